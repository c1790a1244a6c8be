"""The split backward: weight gradients of common modules are computed later than the gradients of their inputs.

While a batch runs, the ``forward`` of every module that is known here records what its weight gradients need and lets
autograd find the input's gradient only. The operations are those of autograd's own formulas, so the results are
bit-identical. Of norms, whose kernels find all gradients in about the time of one, only the accumulation comes later.
Weights of all other modules, and tied ones, get their gradients with the input's, as usual.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from .tensors import run_backward, unsafe_view


class Deferred(NamedTuple):
    """Weight gradients that are still to be computed: of what, and how."""

    weights: list[Tensor]
    compute: Callable[[], Sequence[Tensor]]


class Rule(Protocol):
    """How one kind of module is split.

    ``x`` is None where neither gradient asks for it: unless ``keeps_input``, only that of the weight does.
    """

    keeps_input: bool

    def fits(self, module: Any, x: Tensor) -> bool:
        """Whether the rule covers this call."""

    def forward(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    def input_grad(self, module: Any, grad: Tensor, x: Any, weight: Tensor) -> Tensor | None:
        """The gradient of ``x``."""

    def weight_grads(self, module: Any, wanted: tuple[bool, bool], grad: Tensor, x: Any,
                     weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, where wanted; of ``weight`` only the shape counts."""


class _Linear:
    """nn.Linear: y = x w^T + b, or x w^T and then + b where x cannot be seen as rows."""

    keeps_input = False

    def fits(self, module: nn.Linear, x: Tensor) -> bool:
        return self._has_rows(x) or module.weight.requires_grad  # otherwise x is not kept

    def forward(self, module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_grad(self, module: nn.Linear, grad: Tensor, x: Any, weight: Tensor) -> Tensor:
        return unsafe_view(grad.reshape(-1, grad.shape[-1]).mm(weight), (*grad.shape[:-1], weight.shape[1]))

    def weight_grads(self, module: nn.Linear, wanted: tuple[bool, bool], grad: Tensor, x: Any,
                     weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if wanted[0] else None
        if not wanted[1]:
            return of_weight, None
        # Sums over one dimension and over several add in different orders.
        return of_weight, rows.sum(0) if x is None or self._has_rows(x) else grad.sum(list(range(grad.dim() - 1)))

    def _has_rows(self, x: Tensor) -> bool:
        return x.dim() <= 2 or x.is_contiguous()


class _Conv1D:
    """transformers' Conv1D: y = x w + b, a linear layer with the weight transposed."""

    keeps_input = False

    def fits(self, module: Any, x: Tensor) -> bool:
        return True

    def forward(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view((*x.shape[:-1], module.nf))

    def input_grad(self, module: Any, grad: Tensor, x: Any, weight: Tensor) -> Tensor:
        return unsafe_view(grad.reshape(-1, grad.shape[-1]).mm(weight.t()), (*grad.shape[:-1], weight.shape[0]))

    def weight_grads(self, module: Any, wanted: tuple[bool, bool], grad: Tensor, x: Any,
                     weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows = grad.reshape(-1, grad.shape[-1])
        return (x.reshape(-1, x.shape[-1]).t().mm(rows) if wanted[0] else None, rows.sum(0) if wanted[1] else None)


class _Conv:
    """nn.Conv1d, 2d and 3d, padded with zeros."""

    keeps_input = True

    def fits(self, module: _ConvNd, x: Tensor) -> bool:
        return (module.padding_mode == "zeros" and not isinstance(module.padding, str)
                and x.dim() == 2 + len(module.kernel_size))

    def forward(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return module._conv_forward(x, weight, bias)

    def input_grad(self, module: _ConvNd, grad: Tensor, x: Any, weight: Tensor) -> Tensor:
        return self._backward(module, grad, x, weight, [True, False, False])[0]

    def weight_grads(self, module: _ConvNd, wanted: tuple[bool, bool], grad: Tensor, x: Any,
                     weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, *found = self._backward(module, grad, x, weight, [False, *wanted])
        # Some kernels give what nobody asked for.
        of_weight, of_bias = (gradient if is_wanted else None
                              for gradient, is_wanted in zip(found, wanted, strict=True))
        return of_weight, of_bias

    def _backward(self, module: _ConvNd, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None if module.bias is None else [weight.shape[0]], module.stride, module.padding,
            module.dilation, False, [0] * len(module.stride), module.groups, wanted)


class _Embedding:
    """nn.Embedding with dense gradients."""

    keeps_input = False

    def fits(self, module: nn.Embedding, x: Tensor) -> bool:
        return not module.sparse and module.max_norm is None

    def forward(self, module: nn.Embedding, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        return F.embedding(x, weight, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq)

    def input_grad(self, module: nn.Embedding, grad: Tensor, x: Any, weight: Tensor) -> None:
        return None

    def weight_grads(self, module: nn.Embedding, wanted: tuple[bool, bool], grad: Tensor, x: Any,
                     weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        padding = -1 if module.padding_idx is None else module.padding_idx
        return torch.ops.aten.embedding_dense_backward(grad, x, weight.shape[0], padding,
                                                       module.scale_grad_by_freq), None


_RULES: dict[Any, Rule] = {
    nn.Linear.forward: _Linear(),
    nn.Conv1d.forward: _Conv(),
    nn.Conv2d.forward: _Conv(),
    nn.Conv3d.forward: _Conv(),
    nn.Embedding.forward: _Embedding(),
}
"""By the forward that a module's class has, so that a subclass with a forward of its own is left alone."""

_NORMS = nn.LayerNorm, nn.GroupNorm, _BatchNorm


class SplitBackward:
    """Defers the weight gradients of a module's layers while it is :meth:`installed`."""

    def __init__(self) -> None:
        self._collected: list[Deferred] = []
        # An output has to require a gradient even where the input does not. No leaf: a backward that is asked for the
        # gradients of inputs only does not come to where this leads.
        self._anchor = torch.zeros((), requires_grad=True).clone()

    @contextmanager
    def installed(self, layers: Iterable[nn.Module], tied: Iterable[nn.Parameter]) -> Iterator[None]:
        """Have the known modules in ``layers`` split their backward, but those that hold one of the ``tied`` weights.

        Compiled modules are left alone.
        """
        tied_ids = {id(weight) for weight in tied}
        changed = []
        for layer in layers:
            for module in _not_compiled(layer):
                forward = self._forward_of(module)
                if forward is None or any(id(weight) in tied_ids for weight in module._parameters.values()):
                    continue
                # Past nn.Module.__setattr__, which is slow.
                module.__dict__["forward"] = forward
                changed.append(module)
        try:
            yield
        finally:
            for module in changed:
                del module.__dict__["forward"]

    def collect(self) -> list[Deferred]:
        """The list in which backwards note what they defer, from now until the next call."""
        self._collected = []
        return self._collected

    def _forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        if "forward" in module.__dict__:  # somebody else's
            return None
        own = type(module).forward
        rule = _RULES.get(own)
        transformers = sys.modules.get("transformers.pytorch_utils")
        if rule is None and transformers is not None and own is transformers.Conv1D.forward:
            rule = _Conv1D()
        if rule is not None:
            return partial(self._call, rule, module)
        return partial(self._call_with_proxies, module) if isinstance(module, _NORMS) else None

    def _call(self, rule: Rule, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        x: Any = args[0] if args else kwargs.get("input")
        if len(args) + len(kwargs) != 1 or not _is_common(x):
            return type(module).forward(module, *args, **kwargs)
        # A parametrized weight is computed here, with a graph of its own.
        weight, bias = module.weight, getattr(module, "bias", None)
        wanted = (weight is not None and weight.requires_grad, bias is not None and bias.requires_grad)
        if not torch.is_grad_enabled() or not any(wanted) or weight is None or not rule.fits(module, x) \
                or torch.is_autocast_enabled(x.device.type) or _is_transformed() \
                or weight.is_complex() or 0 in weight.shape:
            return type(module).forward(module, x)
        # In a tuple, autograd does not see the weights.
        return _Split.apply(self._anchor, x, self, rule, module, wanted, (weight, bias))

    def _call_with_proxies(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Let autograd give the weights' gradients to others, which hand them on later."""
        weights = {name: weight for name, weight in module._parameters.items()
                   if weight is not None and weight.requires_grad}
        if not torch.is_grad_enabled() or not weights or _is_transformed():
            return type(module).forward(module, *args, **kwargs)
        for name, weight in weights.items():
            proxy = weight.detach().requires_grad_()
            proxy.register_post_accumulate_grad_hook(partial(self._take_over, weight))
            module._parameters[name] = proxy
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(weights)

    def _take_over(self, weight: Tensor, proxy: Tensor) -> None:
        gradient, proxy.grad = proxy.grad, None
        self.defer([weight], lambda: [gradient])

    def defer(self, weights: list[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        """Note gradients to be computed later."""
        self._collected.append(Deferred(weights, compute))

    def is_asked_for_weights(self) -> bool:
        """Whether the backward that runs is for more than the gradients of some inputs."""
        return torch._C._will_engine_execute_node(self._anchor.grad_fn)


class _Split(torch.autograd.Function):
    """A module's call whose backward gives the input's gradient and defers the weights'."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, owner: SplitBackward, rule: Rule, module: Any,
                wanted: tuple[bool, bool], weights: tuple[Tensor, Tensor | None]) -> Tensor:
        output = rule.forward(module, x, *weights)
        if output._is_view():
            output = unsafe_view(output, output.shape)
        ctx.save_for_backward(x if wanted[0] or rule.keeps_input else None, weights[0] if x.requires_grad else None)
        ctx.call = owner, rule, module, wanted, weights
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        owner, rule, module, wanted, weights = ctx.call
        of_input = rule.input_grad(module, grad, x, weight) if ctx.needs_input_grad[1] else None
        if owner.is_asked_for_weights():
            versions = grad._version, None if x is None else x._version

            def compute() -> list[Tensor]:
                if versions != (grad._version, None if x is None else x._version):
                    raise RuntimeError(f"the input of a {type(module).__name__}, or its output's gradient, was changed "
                                       "in place after its input's gradient was computed and before its weight's; "
                                       'copy it first, or set "split_backward": false')
                return [gradient for gradient in rule.weight_grads(module, wanted, grad, x, weights[0])
                        if gradient is not None]

            owner.defer([target for target, is_wanted in zip(weights, wanted, strict=True) if is_wanted], compute)
        return None, of_input, None, None, None, None, None


def accumulate(deferred: list[Deferred], prologue: Callable[[], None] | None = None) -> None:
    """Compute deferred weight gradients and accumulate them, each weight once, with all its hooks.

    Args:
        deferred: what the backward of one stage and micro-batch deferred, at least one; empty afterwards.
        prologue: to be called inside of the backward, before anything else.
    """
    # autograd runs what was made last first, and accumulates a gradient before it goes on: so the gradients come one
    # after the other, in the order in which a whole backward adds them, and none waits for others in memory.
    roots = [_Give.apply(item.compute, *item.weights) for item in reversed(deferred)]
    deferred.clear()
    if prologue is not None:
        roots[-1].grad_fn.register_prehook(lambda _: prologue())
    run_backward(roots, [root.detach() for root in roots])


class _Give(torch.autograd.Function):
    """Gives weights the gradients that a function computes inside of the backward, whatever comes into it."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Sequence[Tensor]], *weights: Tensor) -> Tensor:
        ctx.compute = compute
        return weights[0].new_zeros(())  # no number would fail in anomaly mode

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        compute, ctx.compute = ctx.compute, None
        return None, *compute()


def _is_common(x: Any) -> bool:
    """Whether an input is a tensor like most."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def _is_transformed() -> bool:
    """Whether gradients are taken in another way than by autograd's backward."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all in it, without those that torch.compile has taken over."""
    if getattr(module, "_compiled_call_impl", None) is None and type(module).__name__ != "OptimizedModule":
        yield module
        for child in module.children():
            yield from _not_compiled(child)
