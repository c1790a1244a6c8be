"""How an order is put together: a sequence of forwards, one of backwards, and how many forwards come first.

The three choices are what tells one schedule from another (compare minPP: a priority and an in-flight cap); each
file beside this one makes them.
"""

from collections.abc import Sequence

from ..actions import BACKWARD, FORWARD, Action, Row

Visit = tuple[int, int]
"""A (stage, micro-batch) pair."""


def arrival_sequence(stages: Sequence[int], micro_batches: int, group: int) -> list[Visit]:
    """A rank's forwards in the order their inputs can arrive, ``group`` micro-batches at a time.

    Within a group a visit is keyed by stage + micro-batch, the step at which it could run if every stage took one;
    of two visits that could run together the deeper comes first.
    """
    visits = [(stage, micro_batch) for micro_batch in range(micro_batches) for stage in stages]
    return sorted(visits, key=lambda v: (v[1] // group, v[0] + v[1], -v[0]))


def departure_sequence(stages: Sequence[int], micro_batches: int, group: int) -> list[Visit]:
    """A rank's backwards, the mirror of :func:`arrival_sequence`: deepest stage first."""
    mirrored = arrival_sequence([-stage for stage in stages], micro_batches, group)
    return [(-stage, micro_batch) for stage, micro_batch in mirrored]


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

