"""The search behind ``schedule: "auto"``: make every named order, simulate each, keep the best."""

from collections.abc import Iterator
from dataclasses import replace

from .actions import Row
from .bounds import lower_bound
from .costs import Costs
from .orders import ORDERS
from .orders._list_scheduler import LARGE, varied_schedule
from .placement import Placement
from .program import Program, complete
from .simulator import simulate
from .split import split_backwards

_TIE = 1e-9
"""Makespans this close, relatively, are equal; sums of the same costs in another order differ by rounding."""


def search(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs,
           split: bool | None, trials: int = 0) -> Program:
    """The program with the shortest simulated step among those within ``max_in_flight``.

    Of equally short ones a whole backward wins, then the one that holds less; but the search ends at the first that no
    order can beat. Orders that depend on costs are made under several assumptions, as list schedulers are led astray by
    little differences: the costs, costs without time for messages, and both with equal stages. Deterministic.

    Args:
        placement: ranks, reuse, route and direction.
        micro_batches: m.
        max_in_flight: cap on the activations of a rank, in micro-batches of a whole rank.
        costs: what the simulation assumes.
        split: consider split backwards only (True), whole ones only (False), or both (None).
        trials: how many variations of list schedules to try besides.
    """
    best: tuple[tuple[float, bool, float], Program] | None = None
    bound = lower_bound(placement, micro_batches, costs, split is not False)
    for name, rows in _orders(placement, micro_batches, max_in_flight, costs, split, trials):
        program = complete(name, rows, placement, micro_batches, max_in_flight)
        peak = max(program.peak_in_flight(rank) for rank in range(placement.ranks))
        if not peak <= max_in_flight:
            continue
        makespan = simulate(program, costs).makespan
        key = (makespan, program.is_split, peak)
        if best is None or _is_less(key, best[0]):
            best = key, program
        if makespan <= bound * (1 + _TIE):
            break
    if best is None:
        raise ValueError(f"max_in_flight {max_in_flight:g} is too small: a rank holds at least 1 micro-batch")
    return best[1]


def _orders(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs, split: bool | None,
            trials: int) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Orders to be tried, with their names."""
    made: dict[tuple[str, Costs], tuple[Row, ...]] = {}
    for name, is_cut, assumed in _candidates(placement, micro_batches, costs, split):
        if (name, assumed) not in made:
            try:
                made[name, assumed] = ORDERS[name].order(placement, micro_batches, max_in_flight, assumed)
            except ValueError:  # not for this placement
                continue
        yield name, split_backwards(made[name, assumed]) if is_cut else made[name, assumed]
    for seed in range(trials):
        for name, is_split in (("zero_bubble", True), ("backward_first", False)):
            if split in (None, is_split):
                varied = varied_schedule(placement, micro_batches, max_in_flight, costs, is_split, seed)
                if varied is not None:
                    yield name, varied


def _candidates(placement: Placement, micro_batches: int, costs: Costs,
                split: bool | None) -> Iterator[tuple[str, bool, Costs]]:
    """Named orders worth making, whether to split their backwards, and the costs to assume in making them."""
    for name, is_cut in _names(placement, micro_batches, costs, split):
        yield name, is_cut, costs
        if ORDERS[name].uses_costs:
            simpler = _assumptions(costs, placement.stages * micro_batches >= LARGE)
            yield from ((name, is_cut, assumed) for assumed in simpler if assumed != costs)


def _assumptions(costs: Costs, is_large: bool) -> list[Costs]:
    """Simpler costs than the real ones; of large programs the simplest only."""
    def equal_stages(times: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(times) / len(times), ) * len(times)

    equal = replace(costs, forward=equal_stages(costs.forward), input_grad=equal_stages(costs.input_grad),
                    weight_grad=equal_stages(costs.weight_grad))
    at_once = [replace(some, latency=0.0, transfer=0.0) for some in (costs, equal)]
    return at_once[1:] if is_large else list(dict.fromkeys((equal, *at_once)))


def _names(placement: Placement, micro_batches: int, costs: Costs, split: bool | None) -> list[tuple[str, bool]]:
    """The most promising first, all where that is cheap.

    Whole ones come first where they can be as short as split ones.
    """
    splits = ["zero_bubble"]
    in_turn = placement.pipes == 1 and (placement.name == "loop" or placement.reuse == 1)
    wholes = ["interleaved_1f1b" if in_turn else "backward_first"]
    if placement.stages * micro_batches < LARGE:
        splits += ["half_memory", "third_memory"]
        wholes += ["backward_first"] * in_turn + ["breadth_first", "gpipe"]
    whole = [(name, False) for name in wholes]
    if split is False:
        return whole
    in_halves = [(name, False) for name in splits] + [(name, True) for name in wholes]
    if split:
        return in_halves
    if lower_bound(placement, micro_batches, costs, split=False) \
            > lower_bound(placement, micro_batches, costs, split=True) * (1 + _TIE):
        return in_halves + whole
    return whole + in_halves


def _is_less(key: tuple[float, bool, float], other: tuple[float, bool, float]) -> bool:
    if abs(key[0] - other[0]) > _TIE * max(key[0], other[0]):
        return key[0] < other[0]
    return key[1:] < other[1:]

