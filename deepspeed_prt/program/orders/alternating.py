"""alternating: whole backwards in turn with forwards, by a list scheduler; for any placement and costs.

Reuse 1 on 2 ranks, 3 micro-batches::

    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._list_scheduler import PREFERENCES, best_of_groups

ALTERNATING = PREFERENCES[1:]


def alternating(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """The shortest list schedule within ``max_in_flight`` where a rank goes on with a forward after a backward.

    That, or with forwards as long as there is room, whichever is shorter.
    """
    return best_of_groups(placement, micro_batches, max_in_flight, costs, placement.stages, preferences=ALTERNATING)
