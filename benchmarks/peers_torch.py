"""torch.distributed.pipelining's schedules as contenders."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import partition_uniform
from torch import nn
from torch.distributed import pipelining

from .work import LEARNING_RATE, Work


class _Stage(nn.Module):
    """Layers in a row. Between stages a tuple travels as separate tensors; layers take and return it as one."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *tensors: torch.Tensor) -> Any:
        value = tensors if len(tensors) > 1 else tensors[0]
        for layer in self.layers:
            value = layer(value)
        return value


def build(work: Work, micro_batches: int, schedule: str, reuse: int,
          placement: str = "loop") -> Callable[[], float | None]:
    """A function that trains one batch and returns its loss, on the rank that computes it.

    Args:
        work: what to train, cut as DeepSpeed's ``uniform`` does.
        micro_batches: m.
        schedule: the name of a class in torch.distributed.pipelining.
        reuse: stages a rank.
        placement: ``loop``, or ``v``: stage r and its mirror image on rank r.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * reuse
    if count > len(work.layers):
        raise ValueError(f"{len(work.layers)} layers cannot fill {count} stages")
    indices = [rank, count - 1 - rank] if placement == "v" else list(range(rank, count, ranks))
    bounds = partition_uniform(len(work.layers), count)
    stages = [pipelining.PipelineStage(_Stage(work.build(bounds[index], bounds[index + 1])), index, count,
                                       torch.device("cpu")) for index in indices]
    runner = getattr(pipelining, schedule)(stages if reuse > 1 else stages[0], micro_batches, loss_fn=work.loss)
    optimizer = torch.optim.AdamW([parameter for stage in stages for parameter in stage.submod.parameters()],
                                  lr=LEARNING_RATE)
    batches = work.batches()

    def step() -> float | None:
        batch = [next(batches) for _ in range(micro_batches)]
        losses: list[torch.Tensor] = []
        runner.step(arg_mbs=[(inputs, ) for inputs, _ in batch] if 0 in indices else None,
                    target_mbs=[labels for _, labels in batch] if count - 1 in indices else None,
                    losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else None

    return step
