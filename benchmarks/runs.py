"""Drives the workers: which contender runs when, and what becomes of its reports."""

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from tests.workers import TIMEOUT, TaskFailed, World

from .contenders import Contender
from .measure import layers_alone, measure
from .report import Row, blank_row, compare, emulated_row, middle_round, timed_row
from .settings import Emulation, Reviews

WARM_UP = 7
"""Steps left out of the timings: shapes are agreed, memory is allocated, costs are measured, and two orders tried."""

Announce = Callable[[str], None]
"""Called with who runs next."""


class Comparison(NamedTuple):
    """The contenders' rows, and what bounds them from below.

    ``ideal_ms`` is a step without any bubble. ``alone_ms`` is that as measured: emulated layers take a little longer
    than they sleep, and no pipeline can be faster than they are without one.
    """

    rows: list[Row]
    ideal_ms: float
    alone_ms: float


def start(ranks: int, step_ms: float | None, steps: int) -> World:
    """Start the workers; ``step_ms`` is the ideal time of the longest step, where it is known."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # the workers talk over gloo, also where there are GPUs
    if step_ms is None:
        return World(ranks)
    # The usual time is for starting up and building; nothing that trains takes twice the ideal on a quiet machine.
    return World(ranks, TIMEOUT + 4 * (WARM_UP + steps) * step_ms / 1000)


def run_emulated(world: World, contenders: Sequence[Contender], emulation: Emulation, micro_batches: int, steps: int,
                 rounds: int, announce: Announce) -> Comparison:
    """Let each contender train in turn on layers that sleep, in rounds; of each its middle round counts."""
    alone: list[float] = []
    per_round: list[list[Row]] = [[] for _ in contenders]
    for _ in range(rounds):
        announce("layers alone")
        alone += map(max, zip(*world.run(layers_alone, emulation, micro_batches, steps), strict=True))
        for contender, rows in zip(contenders, per_round, strict=True):
            announce(contender.name)
            results, refused = _run(world, contender, emulation, micro_batches, WARM_UP, steps)
            rows.append(emulated_row(contender, micro_batches, results, emulation) if refused is None
                        else blank_row(contender, micro_batches, refused))
    rows = [middle_round(rows) for rows in per_round]
    compare(rows, next((row["losses"] for row in rows if row["losses"]), []))
    return Comparison(rows, emulation.ideal_ms(micro_batches), 1000 * min(alone))


def run_real(world: World, contenders: Sequence[Contender], reviews: Reviews, micro_batches: int, steps: int,
             rounds: int, announce: Announce) -> Comparison:
    """Let all contenders train the example BERT, in rounds."""
    from .real import alone, prepare_reviews
    world.run(prepare_reviews, reviews)
    without_pipeline = []
    reports: list[list[list[dict[str, Any]]]] = [[] for _ in contenders]
    refusals: list[str | None] = [None for _ in contenders]
    for _ in range(rounds):
        announce("one process")
        without_pipeline += world.run(alone, reviews, micro_batches, WARM_UP, steps)[:1]
        for index, contender in enumerate(contenders):
            announce(contender.name)
            if refusals[index] is None:
                results, refusals[index] = _run(world, contender, reviews, micro_batches, WARM_UP, steps)
                reports[index].append(results)
    ideal_ms = 1000 * median(_chain(without_pipeline, "seconds")) / world.size
    rows = []
    for contender, refused, per_round in zip(contenders, refusals, reports, strict=True):
        if refused is None:
            per_rank = [{key: _chain(of_rank, key) for key in ("seconds", "losses")}
                        for of_rank in zip(*per_round, strict=True)]
            rows.append(timed_row(contender, micro_batches, per_rank, ideal_ms, median))
        else:
            rows.append(blank_row(contender, micro_batches, refused))
    compare(rows, _chain(without_pipeline, "losses"))
    return Comparison(rows, ideal_ms, ideal_ms)


def _run(world: World, *task: Any) -> tuple[list[dict[str, Any]], str | None]:
    """What each rank reports of a contender, or why it is refused."""
    try:
        return world.run(measure, *task), None
    except TaskFailed as failure:
        # Others may only have waited for the one that refused.
        name, text = min(failure.errors.values(), key=lambda error: error[0] == "Hang")
        return [], f"{name}: {text}"


def _chain(reports: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [value for report in reports for value in report[key]]
