"""breadth_first: one stage after the other, each for all micro-batches (Lamy-Poirier, 2023; torch's LoopedBFS).

Reuse 2 on 2 ranks in a loop, 2 micro-batches::

    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._assemble import one_forward_one_backward


def breadth_first(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """All micro-batches through a stage before the next; holds every micro-batch, whatever ``max_in_flight`` says."""
    rows = []
    for rank in range(placement.ranks):
        visits = placement.visits_of(rank, micro_batches)
        forwards = sorted(visits)
        backwards = sorted(visits, key=lambda visit: (-visit[0], visit[1]))
        rows.append(one_forward_one_backward(forwards, backwards, len(forwards)))
    return tuple(rows)
