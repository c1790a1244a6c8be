"""How an order is put together: a sequence of forwards, one of backwards, and how many forwards come first.

The three choices are what tells one schedule from another (compare minPP: a priority and an in-flight cap); each
file beside this one makes them.
"""

from collections.abc import Sequence

from ..actions import BACKWARD, FORWARD, Action, Row
from ..placement import Placement

Visit = tuple[int, int]
"""A (stage, micro-batch) pair."""


def arrival_sequence(placement: Placement, rank: int, micro_batches: int, group: int) -> list[Visit]:
    """A rank's forwards in the order their inputs can arrive, ``group`` micro-batches at a time.

    Within a group a visit is keyed by the step at which it could run if every stage took one and each pipe took a
    micro-batch a step; of two visits that could run together the deeper comes first.
    """
    pipes = placement.pipes
    return sorted(placement.visits_of(rank, micro_batches),
                  key=lambda v: (v[1] // group, v[0] + v[1] // pipes, -v[0], v[1]))


def departure_sequence(placement: Placement, rank: int, micro_batches: int, group: int) -> list[Visit]:
    """A rank's backwards, the mirror of :func:`arrival_sequence`: deepest stage first."""
    pipes = placement.pipes
    return sorted(placement.visits_of(rank, micro_batches),
                  key=lambda v: (v[1] // group, v[1] // pipes - v[0], v[0], v[1]))


def sequences(placement: Placement, micro_batches: int, group: int) -> tuple[list[list[Visit]], list[list[Visit]]]:
    """Forwards and backwards of every rank, ``group`` micro-batches at a time."""
    return ([arrival_sequence(placement, rank, micro_batches, group) for rank in range(placement.ranks)],
            [departure_sequence(placement, rank, micro_batches, group) for rank in range(placement.ranks)])


def needed_warmup(forwards: Sequence[Visit], backwards: Sequence[Visit]) -> int:
    """The fewest forwards to run ahead so that, alternating afterwards, each backward finds its forward done."""
    position = {visit: index for index, visit in enumerate(forwards)}
    return max((position[visit] - index for index, visit in enumerate(backwards)), default=0)


def one_forward_one_backward(forwards: Sequence[Visit], backwards: Sequence[Visit], warmup: int) -> Row:
    """``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    row = [Action(stage, FORWARD, micro_batch) for stage, micro_batch in forwards[:warmup]]
    behind = len(forwards) - warmup
    for (stage, micro_batch), backward in zip(forwards[warmup:], backwards, strict=False):
        row += Action(stage, FORWARD, micro_batch), Action(backward[0], BACKWARD, backward[1])
    row += [Action(stage, BACKWARD, micro_batch) for stage, micro_batch in backwards[max(behind, 0):]]
    return tuple(row)
