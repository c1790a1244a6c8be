"""The search behind ``schedule: "auto"``: make every named order, simulate each, improve the best."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from .actions import Row
from .bounds import lower_bound
from .communication import add_sends
from .costs import Costs
from .improve import improve
from .orders import ORDERS
from .orders._list_scheduler import LARGE, varied_schedule
from .placement import Placement
from .program import Program, complete, peak_held, splits_backward
from .simulator import DeadlockError, Simulation
from .split import split_backwards

_TIE = 1e-9
"""Makespans this close, relatively, are equal; sums of the same costs in another order differ by rounding."""

_LITTLE = 0.02
"""The part of a stage's forward that a message is assumed to take where it takes no time."""

_IMPROVED = 5
"""How many orders of either kind of backward to improve, where variations are tried; otherwise one."""

_CHANGES, _CHANGED_VISITS = 100, 40_000
"""How many changes to try on each, and of how many (stage, micro-batch) pairs at most in all: tenths of a second."""

_ASSUMING = [("zero_bubble", False), ("backward_first", False), ("alternating", False)]
"""The orders to make under several assumptions: those that win most often."""

_VARIED = {False: ["backward_first", "alternating"], True: ["zero_bubble"]}
"""The orders to try variations of, by whether they split backwards."""

_Candidate = tuple[str, bool, Costs]
"""A named order worth making, whether to split its backwards, and the costs to assume in making it."""


@contextmanager
def _without_collection() -> Iterator[None]:
    """Let no garbage be collected: orders are many tuples in no cycles, to look through which takes half as long again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def search(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs,
           split: bool | None, trials: int = 0, only: str | None = None) -> Program:
    """The program with the shortest simulated step among those within ``max_in_flight``.

    Of equally short ones a whole backward wins, then the one that holds less; but the search ends at the first that no
    order can beat (at a split one only where no whole one can be as short). Where there is none, the shortest are
    improved, which keep their names. The orders that win most often are made under several assumptions, as little
    differences lead list schedulers astray: the costs, costs without time for messages, and both with equal stages.
    Where messages take no time, little is assumed first: of the orders that none can beat, one that expects to wait for
    messages then wins. Deterministic.

    Args:
        placement: ranks, reuse, route and direction.
        micro_batches: m.
        max_in_flight: cap on the activations of a rank, in micro-batches of a whole rank.
        costs: what the simulation assumes.
        split: consider split backwards only (True), whole ones only (False), or both (None).
        trials: how many variations of list schedules to try besides.
        only: consider this order and its variations only, which are to be those of a list scheduler.
    """
    bounds = {is_split: lower_bound(placement, micro_batches, costs, is_split) for is_split in (False, True)}
    is_large = placement.stages * micro_batches >= LARGE
    if only is None:
        names, assuming = _names(placement, is_large, bounds[False] <= bounds[True] * (1 + _TIE), split), _ASSUMING
    else:
        names = assuming = [(only, bool(split) and not ORDERS[only].is_split)]
    assumptions = _assumptions(costs, is_large)
    candidates = [(name, is_cut, assumed) for name, is_cut in names
                  for assumed in (assumptions if (name, is_cut) in assuming else [costs])]
    found: list[_Found] = []

    def is_promising(is_split: bool) -> bool:
        """Whether such a backward can be as short as the best so far."""
        return not found or bounds[is_split] <= _best(found).makespan * (1 + _TIE)

    def program_of(order: "_Found") -> Program:
        return complete(order.name, order.rows, placement, micro_batches, max_in_flight)

    for name, rows in _orders(candidates, placement, micro_batches, max_in_flight, is_promising):
        try:
            order = _Found.of(name, rows, placement, costs)
        except DeadlockError:  # cut down to the cap, its ranks wait for each other in a circle
            continue
        if order.peak <= max_in_flight:
            found.append(order)
            may_lose_to_whole = order.is_split and split is None and is_promising(False)
            if order.makespan <= bounds[split is not False] * (1 + _TIE) and not may_lose_to_whole:
                return program_of(_best(found))
    if not found:
        raise ValueError(f"max_in_flight {max_in_flight:g} is too small: a rank holds at least 1 micro-batch")
    promising = [is_split for is_split in (False, True) if split in (None, is_split) and is_promising(is_split)]
    for is_split in promising:
        kinds = [(name, preference) for name in ([only] if only else _VARIED[is_split])
                 for preference in ORDERS[name].preferences]
        for seed in range(trials):
            name, preference = kinds[seed % len(kinds)]
            varied = varied_schedule(placement, micro_batches, max_in_flight, costs, is_split, preference, seed)
            if varied is not None:
                found.append(_Found.of(name, varied, placement, costs))
    changes = min(_CHANGES, _CHANGED_VISITS // (placement.stages * micro_batches))
    if changes:
        for order in _shortest(found, promising, _IMPROVED if trials else 1):
            improved = improve(program_of(order), costs, changes)
            found.append(_Found.of(order.name, improved.compute_rows(), placement, costs))
    return program_of(_best(found))


def _shortest(found: Sequence["_Found"], kinds: Sequence[bool], count: int) -> list["_Found"]:
    """The ``count`` shortest of each kind of backward, one of each length."""
    shortest: list[_Found] = []
    for is_split in kinds:
        unlike = {order.makespan: order for order in found if order.is_split == is_split}
        shortest += [unlike[makespan] for makespan in sorted(unlike)[:count]]
    return shortest


def _orders(candidates: Iterable[_Candidate], placement: Placement, micro_batches: int, max_in_flight: float,
            is_promising: Callable[[bool], bool]) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Make the candidates whose kind of backward is promising by then."""
    made: dict[tuple[str, Costs], tuple[Row, ...]] = {}
    for name, is_cut, assumed in candidates:
        if not is_promising(is_cut or ORDERS[name].is_split):
            continue
        if (name, assumed) not in made:
            try:
                made[name, assumed] = ORDERS[name].order(placement, micro_batches, max_in_flight, assumed)
            except ValueError:  # not for this placement
                continue
        yield name, split_backwards(made[name, assumed]) if is_cut else made[name, assumed]


def _assumptions(costs: Costs, is_large: bool) -> list[Costs]:
    """What to make an order for: the costs, and others; for large programs only the costs and the simplest."""
    def equal_stages(times: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(times) / len(times), ) * len(times)

    equal = replace(costs, forward=equal_stages(costs.forward), input_grad=equal_stages(costs.input_grad),
                    weight_grad=equal_stages(costs.weight_grad))

    def with_latency(latency: float) -> list[Costs]:
        return [replace(some, latency=latency, transfer=0.0) for some in (costs, equal)]

    if is_large:
        assumptions = [costs, with_latency(0.0)[1]]
    elif costs.hop:
        assumptions = [costs, equal, *with_latency(0.0)]
    else:
        assumptions = [*with_latency(_LITTLE * equal.forward[0]), costs, equal]
    return list(dict.fromkeys(assumptions))


def _names(placement: Placement, is_large: bool, whole_first: bool, split: bool | None) -> list[tuple[str, bool]]:
    """Orders, and whether to split their backwards: the most promising first, all where that is cheap."""
    splits = ["zero_bubble"]
    in_turn = placement.pipes == 1 and (placement.name == "loop" or placement.reuse == 1)
    wholes = ["interleaved_1f1b" if in_turn else "backward_first"]
    if not is_large:
        splits += ["half_memory", "third_memory"]
        wholes += ["backward_first"] * in_turn + ["alternating", "breadth_first", "gpipe"]
    whole = [(name, False) for name in wholes]
    if split is False:
        return whole
    in_halves = [(name, False) for name in splits] + [(name, True) for name in wholes if not is_large]
    if split:
        return in_halves
    return whole + in_halves if whole_first else in_halves + whole


class _Found(NamedTuple):
    """An order, and what it is judged by, the first first; less is better."""

    makespan: float
    is_split: bool
    peak: float
    name: str
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, name: str, rows: tuple[Row, ...], placement: Placement, costs: Costs) -> "_Found":
        simulation = Simulation(add_sends(rows, placement), placement, costs)
        return cls(simulation.makespan(simulation.starts()), splits_backward(rows),
                   max(map(peak_held, rows)) / placement.reuse, name, rows)


def _best(found: Sequence[_Found]) -> _Found:
    """The first of the best."""
    best = found[0]
    for candidate in found[1:]:
        if abs(candidate.makespan - best.makespan) > _TIE * max(candidate.makespan, best.makespan):
            is_better = candidate.makespan < best.makespan
        else:
            is_better = candidate[1:3] < best[1:3]
        if is_better:
            best = candidate
    return best
