"""Gradient clipping in fp32 without ZeRO, by the norm that the stock engine uses.

DeepSpeed's ``clip_grad_norm_`` counts the gradients of model-parallel rank 0, which in a pipeline is its first rank,
and those that are marked as model-parallel. Which layers the first rank holds depends on the placement, so the same
clipping asks for the same layers, wherever they are now.
"""

from typing import Any

from deepspeed.runtime.utils import clip_grad_norm_, is_model_parallel_parameter

from .module import PRTPipelineModule


def clip_like_stock(module: PRTPipelineModule, max_norm: float, mpu: Any) -> None:
    """Clip all gradients of the pipe by the norm of those that the stock engine counts."""
    is_counted_slice = mpu.get_slice_parallel_rank() == 0
    counted = module.parameters_of_first_rank() if is_counted_slice else []
    marked = [parameter for parameter in counted if not is_model_parallel_parameter(parameter)]
    for parameter in marked:
        parameter.model_parallel = True
    try:
        clip_grad_norm_(list(module.parameters()), max_norm, mpu=_OnlyMarked(mpu))
    finally:
        for parameter in marked:
            del parameter.model_parallel


class _OnlyMarked:
    """The grid, for a rank whose unmarked parameters do not count."""

    def __init__(self, mpu: Any) -> None:
        self._mpu = mpu

    def get_model_parallel_rank(self) -> int:
        return -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpu, name)
