"""Gradients between the backwards and their reduction: of weights that stages share, and of those not used."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn


def gradient_of(weight: nn.Parameter, optimizer: Any) -> torch.Tensor | None:
    """The gradient that a batch accumulated, wherever the optimizer keeps it."""
    if isinstance(optimizer, BF16_Optimizer):
        return _accumulated_gradient(weight, optimizer)
    if isinstance(optimizer, ZeROOptimizer):
        return optimizer.get_gradient_for_reduction(weight)
    return weight.grad


def accumulation_dtype(weight: nn.Parameter, optimizer: Any) -> torch.dtype:
    """The dtype of what :func:`gradient_of` gives."""
    if isinstance(optimizer, BF16_Optimizer):
        return optimizer.grad_acc_dtype  # type: ignore[no-any-return]
    if isinstance(optimizer, ZeROOptimizer) and optimizer.use_grad_accum_attribute:
        return optimizer.gradient_accumulation_dtype
    return weight.dtype


def give_gradient(weight: nn.Parameter, gradient: torch.Tensor, optimizer: Any) -> None:
    """Give a weight that has none a gradient, where :func:`gradient_of` finds it."""
    if isinstance(optimizer, ZeROOptimizer) and optimizer.use_grad_accum_attribute:
        weight.grad_accum = gradient
    else:
        weight.grad = gradient


def add_shared_gradients(weights: Mapping[int, list[nn.Parameter]],
                         gradients: dict[tuple[int, int], torch.Tensor | None]) -> None:
    """Add what later stages of this rank accumulated apart, in stage order, and forget it."""
    for stage, shared in sorted(weights.items()):
        for weight in shared:
            gradient = gradients.pop((stage, id(weight)), None)
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient


def reduce_tied_gradients(module: PipelineModule, optimizer: Any) -> None:
    """Sum the gradients of tied weights over the ranks that hold a copy; one that is missing counts as zero."""
    for weight, group in module.get_tied_weights_and_groups():
        if not weight.requires_grad:
            continue
        gradient = gradient_of(weight, optimizer)
        if gradient is None:
            gradient = torch.zeros_like(weight, dtype=accumulation_dtype(weight, optimizer))
            give_gradient(weight, gradient, optimizer)
        dist.all_reduce(gradient, group=group)


def fill_missing_gradients(optimizer: Any) -> None:
    """Give zeros to weights that no backward of this replica reached; other replicas wait for their share.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer, which reduces only the gradients it finds.
    """
    for group in optimizer.bit16_groups:
        for weight in group:
            if weight.requires_grad and optimizer.get_gradient_for_reduction(weight) is None:
                weight.grad = torch.zeros_like(weight)
                if optimizer.use_grad_accum_attribute:
                    optimizer._fill_param_grad_accum_attribute(weight)


def mark_copied_gradients(module: nn.Module, optimizer: Any) -> None:
    """Let FP16_UnfusedOptimizer's norm leave out copies of weights: it looks for the mark at their gradients."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for weight in module.parameters():
            if weight.grad is not None and weight.ds_pipe_replicated:
                weight.grad.ds_pipe_replicated = True


def _accumulated_gradient(weight: nn.Parameter, optimizer: Any) -> torch.Tensor | None:
    """Where BF16_Optimizer accumulates a weight's gradient, in the dtype of its own, marked as present."""
    for group, members in enumerate(optimizer.bf16_groups):
        for index, member in enumerate(members):
            if member is weight:
                optimizer.fp32_groups_has_gradients[group][index] = True
                weight._hp_grad = optimizer.fp32_groups_gradients[group][index]
                return weight._hp_grad
    return None
