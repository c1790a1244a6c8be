"""interleaved_1f1b: one forward, one backward over several stages a rank (Narayanan et al., 2021).

Reuse 2 on 2 ranks in a loop, 4 micro-batches::

    rank 0: 0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

In both directions, reuse 1 on 2 ranks, 4 micro-batches (Chimera; Li and Hoefler, 2021)::

    rank 0: 0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2
    rank 1: 0F1 1F0 1B0 0B1 0F3 1F2 1B2 0B3
"""

from math import ceil

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._assemble import needed_warmup, one_forward_one_backward, sequences
from .backward_first import backward_first


def interleaved_1f1b(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """1F1B over ``reuse`` stages a rank, in equal groups of at most p micro-batches, within ``max_in_flight``.

    In a loop a rank runs ahead by what its own backwards need plus one forward per stage below its last one:
    (v-1)p + (p-1-r), so rank r holds at most (vp - r)/v <= p micro-batches, fewer than with Megatron-LM's
    (v-1)p + 2(p-1-r), and for m divisible by p a step takes exactly m(F+B) + (p-1)(F+B)/v. With reuse 1 this is
    1F1B. In a wave or with two pipes the distance between a rank's stages varies, and a list scheduler decides.
    """
    if placement.pipes > 1 or (placement.name == "wave" and placement.reuse > 1):
        return backward_first(placement, micro_batches, max_in_flight, costs)
    held = int(min(max_in_flight, micro_batches) * placement.reuse)
    group = ceil(micro_batches / ceil(micro_batches / placement.ranks))
    # A smaller group runs ahead less; a group of 1 fits into one micro-batch.
    forwards, backwards = sequences(placement, micro_batches, group)
    while group > 1 and 1 + max(map(needed_warmup, forwards, backwards)) > held:
        group -= 1
        forwards, backwards = sequences(placement, micro_batches, group)
    return tuple(
        one_forward_one_backward(f, b, min(needed_warmup(f, b) + placement.ranks - 1 - rank, held - 1, len(f)))
        for rank, (f, b) in enumerate(zip(forwards, backwards, strict=True)))
