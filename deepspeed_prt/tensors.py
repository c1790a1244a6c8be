"""What passes between stages, and losses: a tensor, or several."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"


def enter_stage(inputs: Tensors) -> Tensors:
    """A stage's leaf inputs as tensors that layers may change in place, without a copy."""
    if not torch.is_grad_enabled():
        return inputs
    # Not a view to autograd, which forbids changing a view of a leaf.
    entered = tuple(torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor.requires_grad else tensor
                    for tensor in as_tuple(inputs))
    return entered[0] if torch.is_tensor(inputs) else entered


def as_tuple(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return (tensors, ) if torch.is_tensor(tensors) else tensors


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
