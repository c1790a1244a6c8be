"""1f1b: DeepSpeed's own schedule, one stage a rank (Narayanan et al., 2019).

4 ranks, 4 micro-batches::

    rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
    rank 2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
    rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from .interleaved_1f1b import interleaved_1f1b


def one_f_one_b(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """1F1B, which is defined for one stage a rank; in both directions this is Chimera's.

    Raises:
        ValueError: the placement has more than one stage a rank.
    """
    if placement.reuse != 1:
        raise ValueError(f"schedule '1f1b' has one stage per rank, got reuse {placement.reuse}: "
                         "use schedule 'interleaved_1f1b' or reuse 1")
    return interleaved_1f1b(placement, micro_batches, max_in_flight, costs)
