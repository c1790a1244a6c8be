"""zero_bubble: split backwards; weight gradients fill what would be bubble (Qi et al., 2024), with stages reused.

Reuse 2 on 2 ranks in a loop, 2 micro-batches::

    rank 0: 0F0 0F1 2F0 2F1 2I0 2W0 2I1 0I0 0I1 2W1 0W0 0W1
    rank 1: 1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._list_scheduler import best_of_groups


def zero_bubble(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs,
                split_from: int = 0) -> tuple[Row, ...]:
    """Input gradients first, weight gradients when nothing else can run, within ``max_in_flight``.

    Stages below ``split_from`` keep their backwards whole: the weight gradients of the others may suffice to fill what
    would be bubble.

    For equal stages with F = I = W and no latency it takes as long as a rank's work and its wait for the first
    micro-batch, and no order can be shorter: in a loop in one direction with any m >= p (with reuse 1 as ZB-H1 does);
    in a wave and in both directions with reuse from 2 on, an even number of ranks and whole groups of p micro-batches.
    """
    return best_of_groups(placement, micro_batches, max_in_flight, costs, split_from)
