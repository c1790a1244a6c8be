"""The search behind ``schedule: "auto"``: make every named order, simulate each, keep the best."""

from .actions import Row
from .bounds import lower_bound
from .costs import Costs
from .orders import ORDERS
from .orders._list_scheduler import LARGE
from .placement import Placement
from .program import Program, complete
from .simulator import simulate
from .split import split_backwards

_TIE = 1e-9
"""Makespans this close, relatively, are equal; sums of the same costs in another order differ by rounding."""


def search(placement: Placement, micro_batches: int, max_in_flight: float, costs: Costs,
           split: bool | None) -> Program:
    """The program with the shortest simulated step among those within ``max_in_flight``.

    Of equally short ones a whole backward wins, then the one that holds less; but the search ends at the first that no
    order can beat. Deterministic.

    Args:
        placement: ranks, reuse, route and direction.
        micro_batches: m.
        max_in_flight: cap on the activations of a rank, in micro-batches of a whole rank.
        costs: what the simulation assumes.
        split: consider split backwards only (True), whole ones only (False), or both (None).
    """
    best: tuple[tuple[float, bool, float], Program] | None = None
    made: dict[str, tuple[Row, ...]] = {}
    for name, is_cut in _candidates(placement, micro_batches, costs, split):
        if name not in made:
            try:
                made[name] = ORDERS[name].order(placement, micro_batches, max_in_flight, costs)
            except ValueError:  # not for this placement
                continue
        rows = split_backwards(made[name]) if is_cut else made[name]
        program = complete(name, rows, placement, micro_batches, max_in_flight)
        peak = max(program.peak_in_flight(rank) for rank in range(placement.ranks))
        if not peak <= max_in_flight:
            continue
        makespan = simulate(program, costs).makespan
        key = (makespan, program.is_split, peak)
        if best is None or _is_less(key, best[0]):
            best = key, program
        if makespan <= lower_bound(placement, micro_batches, costs, split is not False) * (1 + _TIE):
            break
    if best is None:
        raise ValueError(f"max_in_flight {max_in_flight:g} is too small: a rank holds at least 1 micro-batch")
    return best[1]


def _candidates(placement: Placement, micro_batches: int, costs: Costs, split: bool | None) -> list[tuple[str, bool]]:
    """Named orders worth making, and whether to split their backwards; the most promising first, all where that is
    cheap.

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

