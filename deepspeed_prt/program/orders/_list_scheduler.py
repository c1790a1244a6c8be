"""A list scheduler: time passes, and a rank that is free takes the first thing on its list that can run.

Its rows cannot deadlock, since they were executed once, with times, to make them.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush

from ..actions import BACKWARD, FORWARD, Action, Row
from ..placement import Placement
from ._assemble import Visit

FORWARD_TIME = 1
BACKWARD_TIME = 2


def backward_first(placement: Placement, forwards: Sequence[Sequence[Visit]], backwards: Sequence[Sequence[Visit]],
                   held: int) -> tuple[Row, ...]:
    """Backwards before forwards, each by its place in the rank's sequence, with at most ``held`` stage inputs held.

    A forward may overtake others of its rank only while room for those is left, so the cap never locks the pipeline
    as long as it admits ``needed_warmup + 1``.

    Args:
        placement: ranks, reuse and route.
        forwards: for each rank, its forwards by priority.
        backwards: for each rank, its backwards by priority.
        held: the most (stage, micro-batch) pairs that a rank may hold.
    """
    ranks = [_Rank(f, b, held) for f, b in zip(forwards, backwards, strict=True)]
    for stage in placement.stages_of(0):
        if stage == 0:
            for visit in forwards[0]:
                if visit[0] == 0:
                    ranks[0].offer(Action(0, FORWARD, visit[1]))
    last = placement.stages - 1
    events: list[tuple[int, int]] = [(0, rank) for rank in range(placement.ranks)]
    arrivals: list[tuple[int, Action]] = []
    while events or arrivals:
        now = min(events[0][0] if events else arrivals[0][0], arrivals[0][0] if arrivals else events[0][0])
        woken = set()
        while events and events[0][0] == now:
            woken.add(heappop(events)[1])
        while arrivals and arrivals[0][0] == now:
            action = heappop(arrivals)[1]
            rank = placement.rank_of(action.stage)
            ranks[rank].offer(action)
            woken.add(rank)
        for rank in sorted(woken):
            action_or_none = ranks[rank].take(now)
            if action_or_none is None:
                continue
            stage, kind, micro_batch = action_or_none
            done = now + (FORWARD_TIME if kind == FORWARD else BACKWARD_TIME)
            heappush(events, (done, rank))
            if kind == FORWARD and stage < last:
                heappush(arrivals, (done, Action(stage + 1, FORWARD, micro_batch)))
            elif kind == FORWARD:
                heappush(arrivals, (done, Action(stage, BACKWARD, micro_batch)))
            elif stage > 0:
                heappush(arrivals, (done, Action(stage - 1, BACKWARD, micro_batch)))
    return tuple(tuple(rank.row) for rank in ranks)


class _Rank:
    """What one rank has done and could do next."""

    def __init__(self, forwards: Sequence[Visit], backwards: Sequence[Visit], held: int) -> None:
        self.row: list[Action] = []
        self._place = {
            FORWARD: {visit: index for index, visit in enumerate(forwards)},
            BACKWARD: {visit: index for index, visit in enumerate(backwards)},
        }
        self._ready: dict[str, list[tuple[int, Action]]] = {FORWARD: [], BACKWARD: []}
        self._forwards_done: list[int] = []
        self._backwards_done = 0
        self._held = held
        self._busy_until = 0

    def offer(self, action: Action) -> None:
        """Everything that ``action`` needs is there."""
        heappush(self._ready[action.kind], (self._place[action.kind][action.stage, action.micro_batch], action))

    def take(self, now: int) -> Action | None:
        """Start the first action that may run now, if the rank is free and there is one."""
        if now < self._busy_until:
            return None
        if self._ready[BACKWARD]:
            _, action = heappop(self._ready[BACKWARD])
            self._backwards_done += 1
            self._busy_until = now + BACKWARD_TIME
        elif self._ready[FORWARD] and self._has_room(self._ready[FORWARD][0][0]):
            place, action = heappop(self._ready[FORWARD])
            insort(self._forwards_done, place)
            self._busy_until = now + FORWARD_TIME
        else:
            return None
        self.row.append(action)
        return action

    def _has_room(self, place: int) -> bool:
        """Whether the forward at ``place`` and all before it fit under the cap."""
        overtaken = len(self._forwards_done) - bisect_right(self._forwards_done, place)
        return place + 1 + overtaken - self._backwards_done <= self._held
