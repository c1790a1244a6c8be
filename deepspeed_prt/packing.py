"""Layers as bytes, on their way to another rank: pickled as they are, or what they hold where that fails.

Parameters travel with their hooks, which pickling leaves out.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from types import CodeType, MethodType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from .errors import PRTConfigError, PRTError

ModuleKey = tuple[int, str | int]
"""A module before it moves: its rank, and its layer (an int) or its tied key (a str)."""

_Hooks = dict[str, tuple[list[Callable[..., Any]], list[Callable[..., Any]]]]
"""Of parameters, by name: those that run before a gradient is accumulated, and after."""

_MODULES_OWN = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""What every module has: its parameters, buffers, children and hooks."""

_HOOKS = tuple(sorted(name for name in _MODULES_OWN if name.endswith("hooks")))


@dataclass
class _State:
    """What a module holds, without the module: of itself and each module in it, by name, class and attributes too.

    ``left_out`` says what attributes and hooks that cannot travel are like, so that those of the spec can stand in.
    """

    parameters: dict[str, tuple[torch.Tensor, bool]]
    buffers: dict[str, torch.Tensor]
    classes: set[str]
    attributes: dict[str, dict[str, Any]]
    left_out: dict[str, dict[str, Any]]


@dataclass
class _Packed:
    """Modules, or their states, and the hooks of their parameters."""

    content: dict[ModuleKey, nn.Module] | dict[ModuleKey, _State]
    hooks: dict[ModuleKey, _Hooks]


def check_movable(module: nn.Module, layer: int | str) -> None:
    """Refuse what would get lost on the way to another rank.

    Raises:
        PRTConfigError: hooks on parameters that cannot be pickled, or methods that the module's class does not have.
    """
    for name, hooks in _hooks_of(module).items():
        try:
            pickle.dumps(hooks)
        except Exception as error:
            raise PRTConfigError(f"layer {layer} comes to another rank, but a hook on its parameter {name} cannot be "
                                 f"pickled ({error}); make it a function of a module, or register it after "
                                 "deepspeed.initialize") from error
    try:
        _Survey().dump(module)
    except _PatchedMethod as patched:
        raise PRTConfigError(f"layer {layer} comes to another rank, but {patched} was bound to it after it was built, "
                             "and its class has no such method; patch the class, or the object after "
                             "deepspeed.initialize") from None
    except Exception:  # whatever objects raise that cannot be pickled: its spec stands in for it
        pass


def reached_parameters(module: nn.Module) -> set[int]:
    """The ids of all parameters that a module can reach, registered in it or not."""
    survey = _Survey()
    with suppress(Exception):  # whatever objects raise that cannot be pickled
        survey.dump(module)
        return survey.parameters
    return {id(parameter) for parameter in module.parameters()}


def pack(modules: Mapping[ModuleKey, nn.Module]) -> bytes:
    """Write modules that share parameters, if any, together."""
    hooks = {key: _hooks_of(module) for key, module in modules.items()}
    buffer = io.BytesIO()
    try:
        torch.save(_Packed(dict(modules), hooks), buffer)
    except Exception:
        buffer = io.BytesIO()
        torch.save(_Packed({key: _state_of(module) for key, module in modules.items()}, hooks), buffer)
    return buffer.getvalue()


def unpack(payload: bytes, device: str, build: Callable[[ModuleKey], nn.Module]) -> dict[ModuleKey, nn.Module]:
    """Read what :func:`pack` wrote.

    Args:
        payload: the bytes.
        device: where the modules are to be.
        build: makes a module anew from its spec, where it could not be pickled.

    Raises:
        PRTError: such a module was changed after it was built, or shares parameters with others.
    """
    packed: _Packed = torch.load(io.BytesIO(payload), map_location=device, weights_only=False)
    states = {key: state for key, state in packed.content.items() if isinstance(state, _State)}
    if len(states) > 1:
        raise PRTError(f"layers {', '.join(str(key[1]) for key in states)} share parameters and cannot be pickled; "
                       "make them picklable (no lambdas or local classes)")
    modules = {key: module for key, module in packed.content.items() if isinstance(module, nn.Module)}
    for key, state in states.items():
        with _same_random_numbers():
            modules[key] = build(key).to(device)
        _fill(modules[key], state, key[1])
    for key, of_module in packed.hooks.items():
        parameters = dict(modules[key].named_parameters())
        for name, (before, after) in of_module.items():
            parameter = parameters[name]
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # as it was when the hooks came
            for hook in before:
                parameter.register_hook(hook)
            for hook in after:
                parameter.register_post_accumulate_grad_hook(hook)
            parameter.requires_grad_(is_trained)
    return modules


def _hooks_of(module: nn.Module) -> _Hooks:
    hooks = {name: (list((parameter._backward_hooks or {}).values()),
                    list((parameter._post_accumulate_grad_hooks or {}).values()))
             for name, parameter in module.named_parameters()}
    return {name: both for name, both in hooks.items() if any(both)}


def _state_of(module: nn.Module) -> _State:
    parameters = {name: (parameter.detach(), parameter.requires_grad) for name, parameter in module.named_parameters()}
    attributes: dict[str, dict[str, Any]] = {}
    left_out: dict[str, dict[str, Any]] = {}
    for name, part in module.named_modules():
        own = {key: value for key, value in vars(part).items() if key == "training" or key not in _MODULES_OWN}
        attributes[name] = {key: value for key, value in own.items() if _is_plain(value)}
        left_out[name] = {key: _likeness(value) for key, value in own.items() if key not in attributes[name]}
        left_out[name] |= {key: _likeness(getattr(part, key)) for key in _HOOKS}
    return _State(parameters, dict(module.named_buffers()), _classes_of(module), attributes, left_out)


def _classes_of(module: nn.Module) -> set[str]:
    """The class of a module and of each in it, with its name."""
    return {f"{name} ({type(part).__qualname__})" for name, part in module.named_modules()}


def _fill(module: nn.Module, state: _State, layer: int | str) -> None:
    """Give a module built anew what the one on its old rank held."""
    holders = dict(module.named_parameters()), dict(module.named_buffers())
    for what, have, came in (("parameters", set(holders[0]), set(state.parameters)),
                             ("buffers", set(holders[1]), set(state.buffers)),
                             ("modules", _classes_of(module), state.classes)):
        if have != came:
            raise PRTError(f"layer {layer} can be pickled on no rank and was changed after it was built: {what} "
                           f"{sorted(have ^ came)} differ from its spec; make it picklable (no lambdas or local "
                           "classes)")
    for name, part in module.named_modules():
        for key, like in state.left_out[name].items():
            # What the class knows nothing of may stay behind.
            if hasattr(part, key) and _likeness(getattr(part, key)) != like:
                raise PRTError(f"layer {layer} comes to another rank and cannot be pickled, and its "
                               f"{'.'.join(filter(None, (name, key)))} is not what its spec makes; make both picklable "
                               "(no lambdas or local classes), or change it after deepspeed.initialize")
    with torch.no_grad():
        for name, (tensor, requires_grad) in state.parameters.items():
            holders[0][name].data = tensor
            holders[0][name].requires_grad_(requires_grad)
        for name, tensor in state.buffers.items():
            holders[1][name].data = tensor
    for name, part in module.named_modules():
        vars(part).update(state.attributes[name])


def _likeness(value: Any) -> Any:
    """What can be told of a value that cannot travel: its type; also a function's code, and a tensor's bytes."""
    if isinstance(value, dict):
        return [_likeness(item) for item in value.values()]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if isinstance(code, CodeType):
        constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
        return kind, code.co_code, code.co_names, repr(constants)
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return kind, tuple(value.shape), sha256(content.numpy().tobytes()).hexdigest()
    return kind


class _PatchedMethod(Exception):
    """A method bound to an object whose class does not have it: pickling takes it for one that the class has."""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


class _Survey(pickle.Pickler):
    """Goes through all that a module holds, but not into tensors, and notes its parameters."""

    def __init__(self) -> None:
        super().__init__(_Nowhere())
        self.parameters: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter):
                self.parameters.add(id(value))
            return int, ()
        if isinstance(value, MethodType) and not isinstance(value.__self__, type) \
                and getattr(type(value.__self__), value.__name__, None) is not value.__func__:
            raise _PatchedMethod(f"{value.__func__.__qualname__}()")
        return NotImplemented


class _Plain(pickle.Pickler):
    """Refuses tensors and modules, which have an identity to keep."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | nn.Module):
            raise pickle.PicklingError("not plain")
        return NotImplemented


def _is_plain(value: Any) -> bool:
    try:
        _Plain(_Nowhere()).dump(value)
    except Exception:  # whatever objects raise that cannot be pickled
        return False
    return True


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave the generators of python, numpy and torch as they were."""
    import random

    import numpy as np
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerator = get_accelerator()
    device_state = accelerator.get_rng_state() if accelerator.device_name() != "cpu" else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if device_state is not None:
                accelerator.set_rng_state(device_state)
