"""half_memory: split backwards with about half of 1F1B's activations (as V-Half; Qi et al., 2024).

Reuse 2 on 4 ranks in a wave holds 3 micro-batches instead of 4, on 16 ranks 9 instead of 16.
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from .zero_bubble import zero_bubble


def half_memory(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """Zero bubble within :func:`half_memory_cap` unless ``max_in_flight`` is less."""
    cap = min(max_in_flight, half_memory_cap(placement.ranks, micro_batches))
    return zero_bubble(placement, micro_batches, cap, costs)


def half_memory_cap(ranks: int, micro_batches: int) -> float:
    """p/2 + 1 micro-batches."""
    return ranks / 2 + 1
