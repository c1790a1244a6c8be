"""A list scheduler: time passes, and a rank that is free takes the first thing on its lists that can run.

Its rows cannot deadlock, since they were executed once, with times, to make them.
"""

import random
from array import array
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import takewhile
from math import ceil
from typing import Literal, get_args

from ..actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Row
from ..bounds import lower_bound
from ..costs import Costs
from ..placement import Placement
from ._assemble import Visit, sequences

LARGE = 50_000
"""From this many (stage, micro-batch) pairs on a program is large, and fewer things are tried."""

_PATIENCE, _PATIENCE_IF_LARGE = 3, 1
"""After how many sizes of groups that are no better to try no smaller ones."""


Preference = Literal["backward", "alternate", "forward"]
"""What a rank takes if a forward and a backward (or input gradient) can run: that, or the kind it did not take last.
"""

PREFERENCES: tuple[Preference, ...] = get_args(Preference)

Warmup = tuple[tuple[Visit, ...], ...]
"""The forwards that each rank does before anything else, in order; empty for none."""


@dataclass(frozen=True)
class Scheduled:
    """Rows with the time that the last action ends."""

    rows: tuple[Row, ...]
    makespan: float


def best_of_groups(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs,
                   split_from: int, preferences: tuple[Preference, ...] = PREFERENCES) -> tuple[Row, ...]:
    """The shortest of :func:`list_schedule` over sizes of groups, from p micro-batches down, and over preferences.

    Larger groups run ahead further and need more room; which is best depends on the sizes and the cap. Stops at the
    first that no order can beat, and for each preference once smaller groups get no better. Where messages take time,
    all that is tried once more with a warm-up that expects none.
    """
    bound = lower_bound(placement, micro_batches, costs, split_from < placement.stages, max_in_flight)
    bound *= 1 + _SAME_TIME
    best = _best_of_groups(placement, micro_batches, max_in_flight, costs, split_from, preferences, bound)
    assert best is not None, "a group of one micro-batch fits under every cap"
    if costs.hop and best.makespan > bound:
        warmup = _warmup_without_messages(placement, micro_batches, max_in_flight, costs, split_from)
        other = _best_of_groups(placement, micro_batches, max_in_flight, costs, split_from, preferences, bound, warmup)
        if other is not None and other.makespan < best.makespan * (1 - _SAME_TIME):
            best = other
    return best.rows


def _best_of_groups(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs, split_from: int,
                    preferences: tuple[Preference, ...], bound: float, warmup: Warmup = ()) -> Scheduled | None:
    """The same with one warm-up, which may be none; None where the cap leaves no room to go on from it."""
    pairs = placement.stages * micro_batches
    patience = _PATIENCE_IF_LARGE if pairs >= LARGE else _PATIENCE
    best: Scheduled | None = None
    sizes = group_sizes(placement, micro_batches)
    for preference in preferences[:1] if pairs >= LARGE else preferences:
        no_better = 0
        for size in sizes:
            scheduled = list_schedule(placement, micro_batches, size, max_in_flight, costs, split_from, preference,
                                      warmup)
            if scheduled is None:
                continue
            if best is None or scheduled.makespan < best.makespan * (1 - _SAME_TIME):
                best, no_better = scheduled, 0
            else:
                no_better += 1
            if best.makespan <= bound:
                return best
            if no_better == patience:
                break
    return best


@lru_cache(maxsize=16)
def _warmup_without_messages(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs,
                             split_from: int) -> Warmup:
    """The forwards before each rank's first backward where messages take no time.

    A list scheduler that waits for messages takes what comes first, and so lets the micro-batches of two pipes, or of
    a wave's way there and back, get into each other's way. One that expects none fits them together; but its order has
    a rank wait a little for each message as long as the batch lasts, where weight gradients could fill that time.
    """
    without = replace(costs, latency=0.0, transfer=0.0)
    return tuple(tuple((action.stage, action.micro_batch)
                       for action in takewhile(lambda action: action.kind == FORWARD, row))
                 for row in best_of_groups(placement, micro_batches, max_in_flight, without, split_from))


def varied_schedule(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs, split_from: int,
                    preference: Preference, seed: int) -> tuple[Row, ...] | None:
    """One list schedule for slightly wrong costs and a group drawn by ``seed``; None where that gives none.

    A list scheduler decides by what comes first, however little before; wrong by some percent, it decides otherwise.
    """
    draw = random.Random(seed)
    spread = draw.choice((0.01, 0.03, 0.1))

    def vary(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(time * draw.uniform(1 - spread, 1 + spread) for time in times)

    latency = costs.latency * draw.choice((0.0, 0.0, 0.1, 0.3, 1.0))
    assumed = replace(costs, forward=vary(costs.forward), input_grad=vary(costs.input_grad),
                      weight_grad=vary(costs.weight_grad), latency=latency)
    group = draw.choice(group_sizes(placement, micro_batches))
    warmup: Warmup = ()
    if costs.hop and draw.random() < 0.5:
        warmup = _warmup_without_messages(placement, micro_batches, max_in_flight, costs, split_from)
    scheduled = list_schedule(placement, micro_batches, group, max_in_flight, assumed, split_from, preference, warmup)
    return None if scheduled is None else scheduled.rows


def group_sizes(placement: Placement, micro_batches: int) -> list[int]:
    """p, its halves and every size up to 8, made equal over the batch, largest first."""
    halves = []
    size = placement.ranks
    while size > 8:
        halves.append(size)
        size //= 2
    sizes = (ceil(micro_batches / ceil(micro_batches / size)) for size in (*halves, *range(size, 0, -1)))
    return list(dict.fromkeys(sizes))


_SAME_TIME = 1e-9
"""Times this close, as a part of the batch, are one: sums of the same costs in another order differ by rounding."""


def list_schedule(placement: Placement, micro_batches: int, group: int, max_in_flight: float, costs: Costs,
                  split_from: int, preference: Preference, warmup: Warmup = ()) -> Scheduled | None:
    """Backwards (or input gradients) and forwards as is preferred, weight gradients when nothing else can run.

    Each rank begins with the forwards of its ``warmup``, whatever else could run before they are done. Stages from
    ``split_from`` on split their backwards. Each kind goes by its place in the rank's sequences. A forward may overtake
    others of its rank only while room for those is left under ``max_in_flight``; where the ranks wait for each other's
    room for ever, there is no schedule.
    """
    warmup = warmup or ((), ) * placement.ranks
    forward_place, backward_place = _places(placement, micro_batches, group, warmup)
    stages, routes, pipes = placement.stages, placement.routes, placement.pipes
    held = int(min(max_in_flight, micro_batches) * placement.reuse)
    time_forward, time_weight = costs.forward, costs.weight_grad
    time_back = costs.backward[:split_from] + costs.input_grad[split_from:]
    hop = [costs.hop * placement.is_remote(stage) for stage in range(stages + 1)]

    ranks = range(placement.ranks)
    rows: list[list[Action]] = [[] for _ in ranks]
    ready_forward: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
    ready_back: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
    ready_weight: list[deque[tuple[int, int]]] = [deque() for _ in ranks]
    started: list[list[int]] = [[] for _ in ranks]
    freed = [0 for _ in ranks]
    busy_until = [0.0 for _ in ranks]
    for micro_batch in range(micro_batches):
        heappush(ready_forward[routes[micro_batch % pipes][0]], (forward_place[micro_batch], 0, micro_batch))
    # (time, rank, stage or -1 for the rank itself, micro-batch, is a forward)
    events = [(0.0, rank, -1, 0, False) for rank in ranks]
    tolerance = _SAME_TIME * micro_batches * (sum(costs.forward) + sum(costs.backward))
    after_forward, after_back = preference == "forward", preference != "backward"  # whether to prefer a forward then
    prefers_forward = [after_forward for _ in ranks]
    makespan, done = 0.0, 0
    while events:
        now = events[0][0]
        until = now + tolerance
        woken = set()
        while events and events[0][0] <= until:
            _, rank, stage, micro_batch, is_forward = heappop(events)
            woken.add(rank)
            if stage >= 0:
                places, ready = (forward_place, ready_forward) if is_forward else (backward_place, ready_back)
                heappush(ready[rank], (places[stage * micro_batches + micro_batch], stage, micro_batch))
        for rank in sorted(woken):
            if busy_until[rank] > until:
                continue
            is_warming_up = len(started[rank]) < len(warmup[rank])
            if is_warming_up and not (ready_forward[rank] and ready_forward[rank][0][0] == len(started[rank])):
                continue
            if (ready_forward[rank] and (is_warming_up or prefers_forward[rank] or not ready_back[rank])
                    and _has_room(started[rank], ready_forward[rank][0][0], held + freed[rank])):
                place, stage, micro_batch = heappop(ready_forward[rank])
                insort(started[rank], place)
                rows[rank].append(Action(stage, FORWARD, micro_batch))
                end = now + time_forward[stage]
                if stage + 1 < stages:
                    heappush(events, (end + hop[stage + 1], routes[micro_batch % pipes][stage + 1], stage + 1,
                                      micro_batch, True))
                else:
                    heappush(events, (end, rank, stage, micro_batch, False))
                prefers_forward[rank] = after_forward
            elif ready_back[rank]:
                _, stage, micro_batch = heappop(ready_back[rank])
                is_split = stage >= split_from
                rows[rank].append(Action(stage, INPUT_GRAD if is_split else BACKWARD, micro_batch))
                end = now + time_back[stage]
                if is_split:
                    ready_weight[rank].append((stage, micro_batch))
                else:
                    freed[rank] += 1
                if stage > 0:
                    heappush(events, (end + hop[stage], routes[micro_batch % pipes][stage - 1], stage - 1, micro_batch,
                                      False))
                prefers_forward[rank] = after_back
            elif ready_weight[rank]:
                stage, micro_batch = ready_weight[rank].popleft()
                rows[rank].append(Action(stage, WEIGHT_GRAD, micro_batch))
                freed[rank] += 1
                end = now + time_weight[stage]
            else:
                continue
            done += 1
            busy_until[rank] = end
            makespan = max(makespan, end)
            heappush(events, (end, rank, -1, 0, False))
    if done < (3 * stages - split_from) * micro_batches:
        return None
    return Scheduled(tuple(map(tuple, rows)), makespan)


@lru_cache(maxsize=16)
def _places(placement: Placement, micro_batches: int, group: int,
            warmup: Warmup) -> tuple[Sequence[int], Sequence[int]]:
    """Of each visit its place among its rank's forwards, which begin with the warm-up, and among its backwards."""
    forwards, backwards = sequences(placement, micro_batches, group)
    begun = {visit for first in warmup for visit in first}
    forwards = [[*first, *(visit for visit in row if visit not in begun)]
                for first, row in zip(warmup, forwards, strict=True)]
    found = array("i"), array("i")
    for places, rows in zip(found, (forwards, backwards), strict=True):
        places.frombytes(bytes(places.itemsize * placement.stages * micro_batches))
        for row in rows:
            for place, (stage, micro_batch) in enumerate(row):
                places[stage * micro_batches + micro_batch] = place
    return found


def _has_room(started: list[int], place: int, room: int) -> bool:
    """Whether the forward at ``place`` and all before it fit under the cap."""
    overtaken = len(started) - bisect_right(started, place)
    return place + 1 + overtaken <= room
