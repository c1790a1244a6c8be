"""Rows: what was measured of each contender, compared with its peers, as JSON and as a table."""

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .contenders import BASELINE, OURS, Contender
from .settings import Emulation

Row = dict[str, Any]


def blank_row(contender: Contender, micro_batches: int, refused: str | None = None) -> Row:
    """A row with every key."""
    return {"contender": contender.name, "micro_batches": micro_batches, "refused": refused,
            **dict.fromkeys(("ratio", "ratios", "step_ms", "median_ms", "steps_ms", "over_best_peer", "over_baseline",
                             "planned_ratio", "predicted_ratio", "deviation_percent", "peak_in_flight",
                             "peak_in_flight_min", "planned_peak_in_flight", "peak_activation_bytes", "slept_ms",
                             "slept_ms_min", "cpu_ms", "losses", "last_loss", "loss_difference"))}


def timed_row(contender: Contender, micro_batches: int, results: Sequence[dict[str, Any]], ideal_ms: float,
              pick: Callable[[list[float]], float]) -> Row:
    """What the ranks report; the ratio is to the ideal, of the least or the median step, as ``pick`` says."""
    row = blank_row(contender, micro_batches)
    steps_ms = [1000 * max(seconds) for seconds in zip(*(result["seconds"] for result in results), strict=True)]
    losses = next(result["losses"] for result in results if result["losses"][0] is not None)
    return row | {"steps_ms": steps_ms, "step_ms": min(steps_ms), "median_ms": median(steps_ms), "losses": losses,
                  "last_loss": losses[-1], "ratio": pick(steps_ms) / ideal_ms}


def emulated_row(contender: Contender, micro_batches: int, results: Sequence[dict[str, Any]],
                 emulation: Emulation) -> Row:
    """As above with the least step, and with what the layers metered and the simulator predicted."""
    row = timed_row(contender, micro_batches, results, emulation.ideal_ms(micro_batches), min)
    layers, slept = ([result[key] for result in results] for key in ("peak_layers", "slept_ms"))
    row |= {"peak_in_flight": max(layers) / emulation.layers_per_rank,
            "peak_in_flight_min": min(layers) / emulation.layers_per_rank,
            "peak_activation_bytes": max(result["peak_bytes"] for result in results),
            "slept_ms": max(slept), "slept_ms_min": min(slept),
            "cpu_ms": max(result["cpu_ms"] for result in results)}
    if "predicted_ratio" in results[0]:
        row |= {key: results[0][key] for key in ("planned_ratio", "predicted_ratio", "planned_peak_in_flight")}
        row["deviation_percent"] = 100 * (row["predicted_ratio"] / row["ratio"] - 1)
    return row


def middle_round(rounds: Sequence[Row]) -> Row:
    """Of one contender's rows the one with the median ratio, with the ratios of all; or one that says why not."""
    for row in rounds:
        if row["refused"] is not None:
            return row
    by_ratio = sorted(rounds, key=lambda row: row["ratio"])
    return by_ratio[(len(by_ratio) - 1) // 2] | {"ratios": [row["ratio"] for row in rounds]}


def compare(rows: Sequence[Row], reference_losses: Sequence[float]) -> None:
    """Fill in what depends on the other contenders with the same work."""
    timed = [row for row in rows if row["refused"] is None]
    best_peer = min((row["ratio"] for row in timed if not row["contender"].startswith(OURS)), default=None)
    baseline = next((row["ratio"] for row in timed if row["contender"] == BASELINE), None)
    for row in timed:
        row["over_best_peer"] = best_peer and best_peer / row["ratio"]
        row["over_baseline"] = baseline and baseline / row["ratio"]
        row["loss_difference"] = max(abs(a - b) for a, b in zip(row["losses"], reference_losses, strict=True))


class _Column(NamedTuple):
    heading: str
    key: str
    layout: str
    least: str | None = None
    """The key of the least loaded rank's, shown beside the most loaded one's."""


_TIMES = (
    _Column("least ms", "step_ms", "{:.1f}"),
    _Column("median", "median_ms", "{:.1f}"),
    _Column("to ideal", "ratio", "{:.3f}"),
    _Column("best peer", "over_best_peer", "x {:.3f}"),
    _Column("DS 1F1B", "over_baseline", "x {:.3f}"),
    _Column("planned", "planned_ratio", "{:.3f}"),
    _Column("predicted", "predicted_ratio", "{:.3f}"),
    _Column("off by", "deviation_percent", "{:+.1f} %"),
)
_CHECKS = (
    _Column("in flight", "peak_in_flight", "{:g}", "peak_in_flight_min"),
    _Column("planned", "planned_peak_in_flight", "{:g}"),
    _Column("activations", "peak_activation_bytes", "{:,} B"),
    _Column("slept ms", "slept_ms", "{:.1f}", "slept_ms_min"),
    _Column("CPU ms", "cpu_ms", "{:.1f}"),
    _Column("last loss", "last_loss", "{:.6f}"),
    _Column("losses differ", "loss_difference", "{:.1g}"),
)


def print_tables(rows: Sequence[Row], title: str) -> None:
    """Times, then what else was measured, then why some are refused."""
    # In a file or a pipe, lines that are cut off would be of no use.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    done = [row for row in rows if row["refused"] is None]
    for heading, columns in ((title, _TIMES),
                             ("most loaded rank / least loaded, where they differ", _CHECKS)):
        table = Table(title=heading)
        table.add_column("contender")
        shown = [column for column in columns if any(row[column.key] is not None for row in done)]
        for column in shown:
            table.add_column(column.heading, justify="right", no_wrap=True)
        for row in done:
            table.add_row(row["contender"], *(_cell(row, column) for column in shown))
        console.print(table)
    for row in rows:
        if row["refused"] is not None:
            console.print(f"{row['contender']} refused: {row['refused']}", markup=False, highlight=False)


def _cell(row: Row, column: _Column) -> str:
    value = row[column.key]
    if value is None:
        return ""
    text = column.layout.format(value)
    least = None if column.least is None else column.layout.format(row[column.least])
    return text if least in (None, text) else f"{text} / {least}"
