"""The search behind ``schedule: "auto"``: make every named order, simulate each, improve the best."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from .actions import Row
from .bounds import lower_bound
from .communication import add_sends
from .costs import Costs
from .improve import improve
from .orders import ORDERS
from .orders._list_scheduler import LARGE, varied_schedule
from .orders.zero_bubble import zero_bubble
from .placement import Placement
from .program import Program, complete, count_splits, peak_held
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

_ASSUMING = ["zero_bubble", "backward_first", "alternating"]
"""The orders to make under several assumptions, as they are: those that win most often."""

_WHOLE_PARTS = (0.75, 0.5, 0.25, 0)
"""The parts of the stages, from the first one on, of which zero_bubble may keep the backwards whole."""

_VARIED = {False: ["backward_first", "alternating"], True: ["zero_bubble"]}
"""The orders to try variations of, by whether they split backwards."""

_CLOSE = 1.02
"""How much longer than the best an order may be for variations of it to be worth trying."""


class _Kind(NamedTuple):
    """A named order worth making.

    ``is_cut`` says whether to split its backwards, ``split_from`` is the first stage that zero_bubble splits.
    """

    name: str
    is_cut: bool = False
    split_from: int = 0


_Candidate = tuple[_Kind, Costs]
"""An order to make, and the costs to assume in making it."""


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

    Of equally short ones the one that splits the fewest backwards wins, then the one that holds less; but the search
    ends at the first that no order can beat (at one with split backwards only where none without can be as short), and
    those that split fewer stages come first. Where there is none, the shortest are improved, which keep their names.
    The orders that win most often are made under several assumptions, as little differences lead list schedulers
    astray: the costs, costs without time for messages, and both with equal stages. Where messages take no time, little
    is assumed first for orders that split all or none: of those that none can beat, one that expects to wait for
    messages then wins. Deterministic.

    Args:
        placement: ranks, reuse, route and direction.
        micro_batches: m.
        max_in_flight: cap on the activations of a rank, in micro-batches of a whole rank; at least 1.
        costs: what the simulation assumes.
        split: consider orders that split backwards (True), that split none (False), or both (None).
        trials: how many variations of list schedules to try besides.
        only: consider this order and its variations only, which are to be those of a list scheduler.
    """
    @cache
    def bound(is_split: bool, cap: float = max_in_flight) -> float:
        return lower_bound(placement, micro_batches, costs, is_split, cap)

    is_large = placement.stages * micro_batches >= LARGE
    if only is None:
        kinds = _kinds(placement, is_large, bound(False) <= bound(True) * (1 + _TIE), split)
    else:
        kinds = [_Kind(only, bool(split) and not ORDERS[only].is_split)]
    assumptions = _assumptions(costs, is_large)
    # Orders that split some stages only are many, and those that expect no messages win.
    for_some_stages = [assumed for assumed in assumptions if not assumed.hop][:None if trials else 1]

    def assumptions_for(kind: _Kind) -> list[Costs]:
        if kind.split_from:
            return for_some_stages
        return assumptions if only or (kind.name in _ASSUMING and not kind.is_cut) else [costs]

    candidates = [(kind, assumed) for kind in kinds for assumed in assumptions_for(kind)]
    found: list[_Found] = []

    def is_promising(is_split: bool, cap: float = max_in_flight) -> bool:
        """Whether an order with such backwards can be as short as the best so far."""
        return not found or bound(is_split, cap) <= _best(found).makespan * (1 + _TIE)

    def is_kind_promising(kind: _Kind) -> bool:
        own_cap = ORDERS[kind.name].default_cap(placement.ranks, micro_batches)
        holds_less = own_cap < min(max_in_flight, placement.ranks)
        return is_promising(kind.is_cut or ORDERS[kind.name].is_split, own_cap if holds_less else max_in_flight)

    def program_of(order: "_Found") -> Program:
        return complete(order.kind.name, order.rows, placement, micro_batches, max_in_flight)

    for kind, rows in _orders(candidates, placement, micro_batches, max_in_flight, is_kind_promising):
        try:
            order = _Found.of(kind, rows, placement, costs)
        except DeadlockError:  # cut down to the cap, its ranks wait for each other in a circle
            continue
        if order.peak <= max_in_flight:
            found.append(order)
            may_lose_to_whole = order.is_split and split is None and is_promising(False)
            if order.makespan <= bound(split is not False) * (1 + _TIE) and not may_lose_to_whole:
                return program_of(_best(found))
    promising = [is_split for is_split in (False, True) if split in (None, is_split) and is_promising(is_split)]
    for is_split in promising:
        to_vary = [(kind, preference)
                   for kind in ([_Kind(only)] if only else _to_vary(found, is_split))
                   for preference in ORDERS[kind.name].preferences]
        for seed in range(trials):
            kind, preference = to_vary[seed % len(to_vary)]
            varied = varied_schedule(placement, micro_batches, max_in_flight, costs,
                                     kind.split_from if is_split else placement.stages, preference, seed)
            if varied is not None:
                found.append(_Found.of(kind, varied, placement, costs))
    changes = min(_CHANGES, _CHANGED_VISITS // (placement.stages * micro_batches))
    if changes:
        for order in _shortest(found, promising, _IMPROVED if trials else 1):
            improved = improve(program_of(order), costs, changes)
            found.append(_Found.of(order.kind, improved.compute_rows(), placement, costs))
    return program_of(_best(found))


def _to_vary(found: Sequence["_Found"], is_split: bool) -> list[_Kind]:
    """The kinds of orders to try variations of, with the parts of stages to split that came close to the best."""
    alike = [order for order in found if order.is_split == is_split]
    close = _CLOSE * min((order.makespan for order in alike), default=0.0)
    parts = {0, *(order.kind.split_from for order in alike if order.makespan <= close)}
    return [_Kind(name, split_from=split_from) for name in _VARIED[is_split] for split_from in sorted(parts)]


def _shortest(found: Sequence["_Found"], kinds: Sequence[bool], count: int) -> list["_Found"]:
    """The ``count`` shortest of each kind of backward, of each length the best one."""
    shortest: list[_Found] = []
    worst_first = sorted(found, key=lambda order: order[1:3], reverse=True)
    for is_split in kinds:
        unlike = {order.makespan: order for order in worst_first if order.is_split == is_split}
        shortest += [unlike[makespan] for makespan in sorted(unlike)[:count]]
    return shortest


def _orders(candidates: Iterable[_Candidate], placement: Placement, micro_batches: int, max_in_flight: float,
            is_promising: Callable[[_Kind], bool]) -> Iterator[tuple[_Kind, tuple[Row, ...]]]:
    """Make the candidates that are promising by then."""
    made: dict[_Candidate, tuple[Row, ...]] = {}
    for kind, assumed in candidates:
        if not is_promising(kind):
            continue
        as_it_is = kind._replace(is_cut=False), assumed
        if as_it_is not in made:
            order = partial(zero_bubble, split_from=kind.split_from) if kind.split_from else ORDERS[kind.name].order
            try:
                made[as_it_is] = order(placement, micro_batches, max_in_flight, assumed)
            except ValueError:  # not for this placement
                continue
        yield kind, split_backwards(made[as_it_is]) if kind.is_cut else made[as_it_is]


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


def _kinds(placement: Placement, is_large: bool, whole_first: bool, split: bool | None) -> list[_Kind]:
    """Orders, the most promising first, all where that is cheap."""
    parts = _WHOLE_PARTS[-1:] if is_large else _WHOLE_PARTS
    splits = [_Kind("zero_bubble", split_from=int(part * placement.stages)) for part in parts]
    in_turn = placement.pipes == 1 and (placement.name == "loop" or placement.reuse == 1)
    wholes = ["interleaved_1f1b" if in_turn else "backward_first"]
    if not is_large:
        splits += _Kind("half_memory"), _Kind("third_memory")
        wholes += ["backward_first"] * in_turn + ["alternating", "breadth_first", "gpipe"]
    whole = [_Kind(name) for name in wholes]
    if split is False:
        return whole
    kinds = splits + [_Kind(name, is_cut=True) for name in wholes if not is_large]
    if not split:
        kinds = whole + kinds if whole_first else kinds + whole
    return list(dict.fromkeys(kinds))


class _Found(NamedTuple):
    """An order, and what it is judged by, the first first; less is better."""

    makespan: float
    splits: int
    peak: float
    kind: _Kind
    rows: tuple[Row, ...]

    @property
    def is_split(self) -> bool:
        return self.splits > 0

    @classmethod
    def of(cls, kind: _Kind, rows: tuple[Row, ...], placement: Placement, costs: Costs) -> "_Found":
        simulation = Simulation(add_sends(rows, placement), placement, costs)
        return cls(simulation.makespan(simulation.starts()), count_splits(rows),
                   max(map(peak_held, rows)) / placement.reuse, kind, rows)


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
