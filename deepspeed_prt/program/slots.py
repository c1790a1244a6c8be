"""The slot pass: a pipe buffer for each (stage, micro-batch) that a rank holds, reused once it is free."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from .actions import FORWARD, Action, Row
from .placement import Placement

Slots = Mapping[tuple[int, int], int]
"""(stage, micro-batch) -> slot, for one rank."""


def lifetimes(row: Row, placement: Placement) -> dict[tuple[int, int], tuple[int, int]]:
    """First and last index in ``row`` at which each (stage, micro-batch) needs its slot.

    A stage fed by the one below it on the same rank needs its slot from that stage's forward on.
    """
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for index, action in enumerate(row):
        for stage in (action.stage, *_fed_locally(action, placement)):
            visit = (stage, action.micro_batch)
            first, _ = spans.get(visit, (index, index))
            spans[visit] = (first, index)
    return spans


def _fed_locally(action: Action, placement: Placement) -> tuple[int, ...]:
    above = action.stage + 1
    local = action.kind == FORWARD and above < placement.stages and not placement.is_remote(above)
    return (above, ) if local else ()


def assign_slots(rows: Sequence[Row], placement: Placement) -> tuple[dict[tuple[int, int], int], ...]:
    """For each rank the lowest free slot at each first need; as many slots as are ever needed at once."""
    return tuple(_assign(row, placement) for row in rows)


def _assign(row: Row, placement: Placement) -> dict[tuple[int, int], int]:
    slots: dict[tuple[int, int], int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for visit, (first, last) in sorted(lifetimes(row, placement).items(), key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heappush(free, heappop(busy)[1])
        slot = heappop(free) if free else len(busy)
        slots[visit] = slot
        heappush(busy, (last, slot))
    return slots
