"""Programs as CSV files, one row per rank, in the notation of torch.distributed.pipelining."""

import csv
from pathlib import Path

from .actions import Row, parse
from .program import Program


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
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        for line, cells in enumerate(csv.reader(file), start=1):
            if not cells:
                continue
            try:
                rows.append(tuple(parse(cell.strip()) for cell in cells if cell.strip()))
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
    return tuple(rows)


def read_compute_rows(path: Path) -> tuple[Row, ...]:
    """Read the compute actions of a CSV file, as a schedule: sends and receives follow from the placement.

    Raises:
        ValueError: a cell is not an action.
    """
    return tuple(tuple(action for action in row if action.is_compute) for row in read_rows(path))
