"""Where a schedule comes from: a name, a CSV file, or a function of the user's."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .actions import Action, Row, parse, parse_row
from .csv_format import from_csv
from .placement import Placement
from .program import Program, build, complete, default_cap
from .verifier import verify


def program_from(schedule: str, placement: Placement, micro_batches: int,
                 max_in_flight: float | None = None) -> Program:
    """Make and verify the program that ``schedule`` stands for.

    Args:
        schedule: a name or ``"auto"``, the path of a ``.csv`` file, or ``"package.module:function"``: a function of
            (placement, micro_batches, max_in_flight) that returns one row of compute actions (or strings) per rank.
        placement: ranks, reuse and route.
        micro_batches: m.
        max_in_flight: cap on a rank's activations; see :func:`~deepspeed_prt.program.program.default_cap`.

    Raises:
        ValueError: there is no such schedule, or it cannot be made for these sizes.
        ProgramError: the program does not verify.
    """
    if schedule.endswith(".csv"):
        program = from_csv(Path(schedule), placement, micro_batches, max_in_flight)
    elif ":" in schedule:
        cap = default_cap(schedule, placement.ranks, micro_batches) if max_in_flight is None else max_in_flight
        rows = _rows(schedule, _load(schedule)(placement, micro_batches, cap))
        program = complete(schedule, rows, placement, micro_batches, cap)
    else:
        program = build(schedule, placement, micro_batches, max_in_flight)
    verify(program)
    return program


def _rows(schedule: str, returned: object) -> list[Row]:
    """What a user's function returned, as rows.

    Raises:
        ValueError: it is not one row of actions or strings per rank.
    """
    try:
        return [tuple(parse(item) if isinstance(item, str) else Action(*item) for item in row)
                if not isinstance(row, str) else parse_row(row) for row in returned]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule {schedule!r} has to return one row of actions per rank, like "
                         f"[\"0F0 0B0\", \"1F0 1B0\"]: {error}") from error


def _load(path: str) -> Callable[[Placement, int, float], object]:
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"schedule {path!r} cannot be loaded: {error}; write \"package.module:function\"") from error
    if not callable(function):
        raise ValueError(f"schedule {path!r} is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # whatever the user wrote
