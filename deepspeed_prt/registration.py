"""Arming: makes DeepSpeed build PRTPipelineEngine where a config has the ``"prt"`` section.

torch calls :func:`arm` at the end of ``import torch`` (entry-point group ``torch.backends``), before anything of
DeepSpeed is loaded, so it only leaves a note with the import system: when DeepSpeed's pipeline engine is loaded, its
class gets a ``__new__`` that may choose a subclass, as ``pathlib.Path`` does. Nothing here imports torch or deepspeed.
"""

import functools
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TARGET = "deepspeed.runtime.pipe.engine"


def arm() -> None:
    """Register with DeepSpeed now if its pipeline engine is loaded, else as soon as it is. Idempotent."""
    if _TARGET in sys.modules:
        _register(sys.modules[_TARGET])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the pipeline engine as usual and registers after loading it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The engine's own loader, followed by the registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)


def _register(pipe_engine: ModuleType) -> None:
    base = pipe_engine.DeepSpeedEngine
    if "__new__" in vars(base):
        return
    base.__new__ = staticmethod(_new_engine)
    _remember_arguments(pipe_engine.PipelineModule)


def _new_engine(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.__new__``: the class asked for, or PRTPipelineEngine where the config says so."""
    config = getattr(kwargs.get("config_class"), "_param_dict", None) or kwargs.get("config")
    model = kwargs.get("model")
    has_section = isinstance(config, dict) and config.get("prt") is not None
    ours = sys.modules.get("deepspeed_prt.module")
    if has_section or (ours is not None and isinstance(model, ours.PRTPipelineModule)):
        from .integration import select_engine
        cls = select_engine(cls, config if isinstance(config, dict) else {}, model)
    return object.__new__(cls)


def _remember_arguments(module_class: type) -> None:
    """Have a PipelineModule keep what it forgets and migration needs: how to partition, and how it was compiled."""
    init, compile_ = module_class.__init__, module_class.compile  # type: ignore[attr-defined,misc]
    signature = inspect.signature(init)

    @functools.wraps(init)
    def remembering_init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        self.__dict__["_prt_partition_method"] = bound.arguments["partition_method"]
        init(self, *args, **kwargs)

    @functools.wraps(compile_)
    def remembering_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_prt_compile_arguments"] = (args, kwargs)
        return compile_(self, *args, **kwargs)

    module_class.__init__ = remembering_init  # type: ignore[misc]
    module_class.compile = remembering_compile  # type: ignore[attr-defined]
