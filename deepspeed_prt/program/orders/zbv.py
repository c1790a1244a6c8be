"""zbv: zero_bubble on a wave of two stages a rank, a V, in which every rank holds as much (Qi et al., 2024).

2 ranks, 2 micro-batches::

    rank 0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from .zero_bubble import zero_bubble


def zbv(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """Zero bubble in a V.

    Raises:
        ValueError: the placement is not a wave of reuse 2.
    """
    if (placement.name, placement.reuse) != ("wave", 2):
        raise ValueError(f"schedule 'zbv' is for placement 'wave' with reuse 2, got '{placement.name}' with reuse "
                         f"{placement.reuse}: use schedule 'zero_bubble'")
    return zero_bubble(placement, micro_batches, max_in_flight, costs)
