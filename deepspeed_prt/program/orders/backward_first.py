"""backward_first: whole backwards as soon as they can run, by a list scheduler; for any placement and costs.

Reuse 2 on 2 ranks in a wave, 2 micro-batches::

    rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
    rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._list_scheduler import PREFERENCES, best_of_groups

BACKWARD_FIRST = PREFERENCES[:1]


def backward_first(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """The shortest list schedule of whole backwards within ``max_in_flight``."""
    return best_of_groups(placement, micro_batches, max_in_flight, costs, placement.stages, preferences=BACKWARD_FIRST)
