"""The two copies of each stage in a bidirectional pipeline: their gradients are summed, so that they stay equal.

Rank r and its mirror, rank p-1-r, hold the same stages, so the sums are between pairs of ranks. Each stage's starts as
soon as both copies have all their gradients, and runs beside the drain of the pipeline.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .control import Control
from .gradients import accumulation_dtype, give_gradient, gradient_of
from .module import PRTPipelineModule

SMALL = 2**18
"""Stages with fewer elements wait for others to travel with: a sum costs a round trip, however small it is."""


class _Bucket(NamedTuple):
    """Gradients on their way, flattened one after the other."""

    weights: list[nn.Parameter]
    flat: torch.Tensor
    work: dist.Work


class Replicas:
    """This rank's side of the sums over both copies.

    Args:
        module: gives the weights and the group of the pair; the middle one of an odd number of ranks has none.
        optimizer: knows where gradients are kept.
        bucket_size: the most elements that travel together.
    """

    def __init__(self, module: PRTPipelineModule, optimizer: Any, bucket_size: int) -> None:
        self._module = module
        self._optimizer = optimizer
        self._bucket_size = bucket_size
        self._weights = module.replicated_parameters()
        self._waiting: dict[nn.Parameter, None] = {}
        self._buckets: list[_Bucket] = []
        self._lacking: dict[nn.Parameter, bool] = {}

    @property
    def lacks_gradients(self) -> bool:
        """Whether some weight of this rank got no gradient, so that :meth:`finish` has to ask the other."""
        return any(self._lacking.values())

    def start(self, stage: int | None, failed: bool = False) -> None:
        """Start to sum the gradients of a stage; zeros for a batch that failed, also where this call did.

        None stands for what stages share, and for the end: nothing waits for company any longer.
        """
        if self._module.replica_group is None:
            return
        self._waiting.update((weight, None) for weight in self._weights[stage]
                             if weight.requires_grad and weight not in self._lacking)
        if stage is not None and sum(weight.numel() for weight in self._waiting) < SMALL:
            return
        for weights in _pack(list(self._waiting), self._bucket_size):
            dtype = accumulation_dtype(weights[0], self._optimizer)
            gradients = [None if failed else gradient_of(weight, self._optimizer) for weight in weights]
            flat = torch.cat([torch.zeros(weight.numel(), dtype=dtype, device=weight.device) if gradient is None
                              else gradient.reshape(-1) for weight, gradient in zip(weights, gradients, strict=True)])
            work = dist.all_reduce(flat, group=self._module.replica_group, async_op=True)
            self._buckets.append(_Bucket(weights, flat, work))
            for weight, gradient in zip(weights, gradients, strict=True):
                self._lacking[weight] = gradient is None
                del self._waiting[weight]

    def finish(self, lacking_somewhere: bool, control: Control) -> None:
        """Wait for the sums and put them into place; a weight that neither copy has a gradient of gets none.

        Args:
            lacking_somewhere: whether any rank :attr:`lacks_gradients`, on all ranks alike.
            control: asks the other rank which it has.
        """
        lack = dict.fromkeys(self._lacking, False)
        if lacking_somewhere:
            everyones = control.gather(list(self._lacking.values()))
            theirs = everyones[self._module.placement.mirror(self._module.stage_id)]
            lack = {weight: mine and other
                    for (weight, mine), other in zip(self._lacking.items(), theirs, strict=True)}
        for weights, flat, work in self._buckets:
            work.wait()
            for weight, total in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                gradient = gradient_of(weight, self._optimizer)
                if gradient is not None:
                    gradient.copy_(total.view_as(gradient))
                elif not lack[weight]:
                    give_gradient(weight, total.view_as(weight).clone(), self._optimizer)
        self.discard()

    def discard(self) -> None:
        """Forget the sums of a batch; they have to have arrived."""
        for bucket in self._buckets:
            bucket.work.wait()
        self._waiting.clear()
        self._buckets.clear()
        self._lacking.clear()


def _pack(weights: list[nn.Parameter], bucket_size: int) -> Iterator[list[nn.Parameter]]:
    """Weights that travel together: of one dtype and ``bucket_size`` elements at most, unless one alone has more."""
    bucket: list[nn.Parameter] = []
    for weight in weights:
        is_full = bucket and (sum(other.numel() for other in bucket) + weight.numel() > bucket_size
                              or bucket[0].dtype != weight.dtype)
        if is_full:
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket


class ReplicaNorms:
    """The running statistics of batch norms, of which each copy sees only the micro-batches of its own pipe.

    In a batch each copy keeps a part of what the statistics were and adds what its micro-batches tell. Both together
    keep less: the part that is left after all micro-batches.
    """

    def __init__(self, module: PRTPipelineModule) -> None:
        self._group = module.replica_group
        self._pipes = module.placement.pipes
        self._norms: list[tuple[int, _NormBase]] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._group is None:
            return
        for layer_id, layer in module.layer_modules():
            stage = module.stage_of(layer_id)
            pipe = next(pipe for pipe in range(self._pipes) if module.placement.rank_of(stage, pipe) == module.stage_id)
            self._norms += [(pipe, norm) for norm in layer.modules()
                            if isinstance(norm, _NormBase) and norm.running_mean is not None]

    def begin(self) -> None:
        """Note the statistics before a batch, and how many micro-batches are in them."""
        self._before = [(_statistics(norm), norm.num_batches_tracked.double()) for _, norm in self._norms]

    def combine(self, micro_batches: int) -> None:
        """After a batch, weigh what each copy was told by its micro-batches, and count those of both."""
        if not self._norms:
            return
        told, counted = [], []
        for (pipe, norm), (before, count) in zip(self._norms, self._before, strict=True):
            share = len(range(pipe, micro_batches, self._pipes)) / micro_batches
            counted.append(norm.num_batches_tracked - count)
            kept = _kept(norm, count, counted[-1])
            told.append(share * (_statistics(norm) - kept * before) / (1 - kept))
        flat = torch.cat([*told, torch.stack(counted)])
        dist.all_reduce(flat, group=self._group)
        *sums, counts = flat.split([*map(len, told), len(counted)])
        for (_, norm), (before, count), total, seen in zip(self._norms, self._before, sums, counts, strict=True):
            kept = _kept(norm, count, seen)
            _set(norm, kept * before + (1 - kept) * total, count + seen)


    def discard(self) -> None:
        """Undo a batch that failed: each copy has seen what it got to, and combining counts on equal ones before."""
        for (_, norm), (before, count) in zip(self._norms, self._before, strict=True):
            _set(norm, before, count)


def _set(norm: _NormBase, statistics: torch.Tensor, count: torch.Tensor) -> None:
    mean, variance = statistics.split(norm.num_features)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    norm.num_batches_tracked.copy_(count)


def _statistics(norm: _NormBase) -> torch.Tensor:
    return torch.cat((norm.running_mean, norm.running_var)).double()


def _kept(norm: _NormBase, count: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The part of statistics of ``count`` micro-batches that is left after ``more``.

    None of it, as far as combining goes, where the norm does not count them (as instance norms) or never changes.
    """
    kept = count / (count + more) if norm.momentum is None else (1 - norm.momentum)**more
    return torch.where(kept < 1, kept, 0.0)
