"""gpipe: every forward as its input arrives, then every backward (Huang et al., 2019).

Reuse 2 on 2 ranks in a loop, 2 micro-batches::

    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
"""

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._assemble import one_forward_one_backward, sequences


def gpipe(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs) -> tuple[Row, ...]:
    """All forwards, then all backwards; holds every micro-batch, whatever ``max_in_flight`` says."""
    forwards, backwards = sequences(placement, micro_batches, micro_batches)
    return tuple(one_forward_one_backward(f, b, len(f)) for f, b in zip(forwards, backwards, strict=True))
