"""Where a schedule comes from: a name, a CSV file, or a function of the user's."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .actions import Action, Row, parse, parse_row
from .build import build, default_cap
from .costs import Costs
from .csv_format import read_compute_rows
from .errors import ProgramError
from .placement import Placement
from .program import Program, complete
from .split import split_backwards
from .verifier import verify


def program_from(schedule: str, placement: Placement, micro_batches: int, max_in_flight: float | None = None,
                 costs: Costs | None = None, split: bool | None = None, trials: int = 0) -> Program:
    """Make and verify the program that ``schedule`` stands for.

    Args:
        schedule: a name or ``"auto"``, the path of a ``.csv`` file, or ``"package.module:function"``: a function of
            (placement, micro_batches, max_in_flight) that returns one row of compute actions (or strings) per rank.
        placement: ranks, reuse and route.
        micro_batches: m.
        max_in_flight: cap on a rank's activations; see :func:`~deepspeed_prt.program.build.default_cap`.
        costs: what orders that depend on costs assume; see :func:`~deepspeed_prt.program.build.build`.
        split: as of :func:`~deepspeed_prt.program.build.build`.
        trials: of ``"auto"``; see :func:`~deepspeed_prt.program.search.search`.

    Raises:
        ValueError: there is no such schedule, or it cannot be made for these sizes.
        ProgramError: the program does not verify.
    """
    if is_users_own(schedule):
        cap = default_cap(schedule, placement.ranks, micro_batches) if max_in_flight is None else max_in_flight
        rows = read_compute_rows(Path(schedule)) if schedule.endswith(".csv") \
            else _rows(schedule, _call(schedule, placement, micro_batches, cap))
        if split:
            rows = split_backwards(rows)
        try:
            program = complete(schedule, rows, placement, micro_batches, cap)
            verify(program)
        except ProgramError as error:
            raise ProgramError(f"schedule {schedule!r}, for {placement.ranks} ranks with reuse {placement.reuse} in a "
                               f"{placement.name} and {micro_batches} micro-batches: {error}") from error
        if split is False and program.is_split:
            raise ValueError(f"schedule {schedule!r} splits the backward, which split_backward false forbids; leave "
                             "split_backward out or write B instead of I and W")
    else:
        program = build(schedule, placement, micro_batches, max_in_flight, costs, split, trials)
        verify(program)
    return program


def is_users_own(schedule: str) -> bool:
    """Whether a schedule is a file or a function of the user's."""
    return schedule.endswith(".csv") or ":" in schedule


def _call(schedule: str, placement: Placement, micro_batches: int, cap: float) -> object:
    """What a user's function returns.

    Raises:
        ValueError: it cannot be loaded, or fails.
    """
    function = _load(schedule)
    try:
        return function(placement, micro_batches, cap)
    except Exception as error:
        raise ValueError(f"schedule {schedule!r}, called with (placement, micro_batches, max_in_flight), failed with "
                         f"{type(error).__name__}: {error}") from error


def _rows(schedule: str, returned: object) -> tuple[Row, ...]:
    """What a user's function returned, as rows.

    Raises:
        ValueError: it is not one row of actions or strings per rank.
    """
    try:
        return tuple(tuple(parse(item) if isinstance(item, str) else Action(*item) for item in row)
                     if not isinstance(row, str) else parse_row(row) for row in returned)  # type: ignore[attr-defined]
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
