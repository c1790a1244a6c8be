"""The decision at ``deepspeed.initialize``: which engine runs, and what is refused before anything is done."""

from typing import Any

from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from .config import read_section
from .engine import PRTPipelineEngine
from .errors import PRTConfigError
from .module import PRTPipelineModule


def select_engine(cls: type, ds_config: dict[str, Any], model: Any) -> type:
    """The engine class to build where ``cls`` was asked for.

    Raises:
        PRTConfigError: the section is wrong, or cannot take effect here.
    """
    section = read_section(ds_config)
    if section is None:
        if isinstance(model, PRTPipelineModule) and cls is PipelineEngine:
            return PRTPipelineEngine
        return cls
    if issubclass(cls, PRTPipelineEngine):
        return cls
    if isinstance(model, DualPipeVModule):
        raise PRTConfigError('the "prt" section cannot take effect on a DualPipeVModule, which brings its own '
                             'schedule; build a PipelineModule, or set "prt": {"enabled": false}')
    if not isinstance(model, PipelineModule):
        raise PRTConfigError(f'the "prt" section cannot take effect on a {type(model).__name__}: it needs a '
                             'deepspeed.pipe.PipelineModule; build one, or set "prt": {"enabled": false}')
    if cls is not PipelineEngine:
        raise PRTConfigError(f'the "prt" section cannot take effect in a {cls.__name__}: it replaces PipelineEngine '
                             'only; use deepspeed.initialize, derive from PRTPipelineEngine, or set '
                             '"prt": {"enabled": false}')
    return PRTPipelineEngine


