"""What passes between stages, and losses: a tensor, or several."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

Tensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"


unsafe_view = torch.ops.aten._unsafe_view.default
"""A view that does not know of what: autograd may then add to it, and layers change it, in place."""


def enter_stage(inputs: Tensors) -> Tensors:
    """A stage's leaf inputs as tensors that layers may change in place, without a copy."""
    if not torch.is_grad_enabled():
        return inputs
    return _alias(inputs) if isinstance(inputs, torch.Tensor) else tuple(map(_alias, inputs))


def _alias(leaf: torch.Tensor) -> torch.Tensor:
    # Not a view to autograd, which forbids changing a view of a leaf.
    return unsafe_view(leaf, leaf.shape) if leaf.requires_grad else leaf


def fit_to_be_sent(outputs: Tensors, inputs: Tensors) -> Tensors:
    """A stage's outputs, which nobody changes before they have left.

    What needs no gradient may be a buffer that a layer fills again for each micro-batch, and is copied, unless it came
    in as it goes out, like a mask that passes all stages: each micro-batch has inputs of its own.
    """
    tensors = as_tuple(outputs)
    if all(tensor.requires_grad for tensor in tensors):
        return outputs
    came_in = {tensor.untyped_storage().data_ptr() for tensor in as_tuple(inputs)}
    fit = tuple(tensor if tensor.requires_grad or tensor.untyped_storage().data_ptr() in came_in else tensor.clone()
                for tensor in tensors)
    return fit[0] if isinstance(outputs, torch.Tensor) else fit


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where the gradient of a tensor that requires one enters its graph, which the edge keeps, but not the tensor."""
    # Of a view, whose node is never one of Python's, as those keep no graph: get_gradient_edge() takes far longer.
    return GradientEdge(tensor.view_as(tensor).grad_fn, 0)


def run_backward(roots: "Sequence[torch.Tensor | GradientEdge]", gradients: Sequence[torch.Tensor]) -> None:
    """As ``torch.autograd.backward``, which looks at the gradients' shapes first, and longer than a small layer takes.

    Args:
        roots: where the gradients enter.
        gradients: as many, of the roots' shapes.
    """
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True,
                         accumulate_grad=True)


def as_tuple(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return (tensors, ) if isinstance(tensors, torch.Tensor) else tensors


def gradients_of(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a stage's inputs; one that nothing contributed to is zero."""
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs
            if tensor.requires_grad]


def parts_of(loss: Any) -> list[torch.Tensor]:
    """A loss, a tensor or several, as several."""
    return [loss] if torch.is_tensor(loss) else list(loss)


def detach(loss: Any) -> Any:
    """A loss, a tensor or several, without its graph."""
    return loss.detach() if torch.is_tensor(loss) else [part.detach() for part in loss]


def add(total: Any, loss: Any) -> Any:
    """Add one micro-batch's loss, a tensor or a list of them, to a sum that may not exist yet."""
    if torch.is_tensor(loss):
        return loss.clone() if total is None else total.add_(loss)
    return [add(None if total is None else total[index], part) for index, part in enumerate(loss)]
