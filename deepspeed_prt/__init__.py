"""Pipeline Reuse Technology for DeepSpeed: several pipeline stages per GPU, switched on by one config key."""

from typing import TYPE_CHECKING, Any

from .registration import arm

if TYPE_CHECKING:
    from .engine import PRTPipelineEngine
    from .module import PRTPipelineModule
    from .schedule import PRTSchedule

__version__ = "0.1.0"
__all__ = ["PRTPipelineEngine", "PRTPipelineModule", "PRTSchedule"]

_HOME = {"PRTPipelineEngine": "engine", "PRTPipelineModule": "module", "PRTSchedule": "schedule"}


def __getattr__(name: str) -> Any:
    """Load public names on first use: torch imports this package at its start, which has to cost next to nothing."""
    if name in _HOME:
        from importlib import import_module
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


arm()
