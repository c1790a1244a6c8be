"""Programs as CSV files, one row per rank, in the notation of torch.distributed.pipelining."""

import csv
from pathlib import Path

from .actions import Row, parse
from .placement import Placement
from .program import Program, complete, default_cap


def to_csv(program: Program, path: Path) -> None:
    """Write the whole program, sends and receives included."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([str(action) for action in row] for row in program.rows)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read the rows of a CSV file; empty cells are skipped.

    Raises:
        ValueError: a cell is not an action; the message names the line.
    """
    if not path.is_file():
        raise ValueError(f"there is no CSV file {str(path)!r}")
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line, cells in enumerate(csv.reader(file), start=1):
            if not cells:
                continue
            try:
                rows.append(tuple(parse(cell.strip()) for cell in cells if cell.strip()))
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
    return tuple(rows)


def from_csv(path: Path, placement: Placement, micro_batches: int, max_in_flight: float | None = None) -> Program:
    """Read a program. Sends and receives in the file are put in anew, so a file of compute actions is enough.

    Raises:
        ValueError: a cell is not an action.
    """
    compute_rows = tuple(tuple(action for action in row if action.is_compute) for row in read_rows(path))
    cap = default_cap("csv", placement.ranks, micro_batches) if max_in_flight is None else max_in_flight
    return complete(str(path), compute_rows, placement, micro_batches, cap)
