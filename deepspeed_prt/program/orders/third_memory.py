"""third_memory: split backwards with about a third of 1F1B's activations (as V-Min; Qi et al., 2024).

Reuse 2 on 6 ranks in a wave holds 3 micro-batches instead of 6, on 15 ranks 6 instead of 15.
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from .zero_bubble import zero_bubble


def third_memory(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """Zero bubble within :func:`third_memory_cap` unless ``max_in_flight`` is less."""
    cap = min(max_in_flight, third_memory_cap(placement.ranks, micro_batches))
    return zero_bubble(placement, micro_batches, cap, costs)


def third_memory_cap(ranks: int, micro_batches: int) -> float:
    """p/3 + 1 micro-batches."""
    return (ranks + 3) / 3
