"""Where a schedule comes from: a name, a CSV file, or a function of the user's."""

from importlib import import_module
from pathlib import Path

from .actions import Action, parse
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
        rows = _load(schedule)(placement, micro_batches, cap)
        program = complete(schedule, [tuple(map(_action, row)) for row in rows], placement, micro_batches, cap)
    else:
        program = build(schedule, placement, micro_batches, max_in_flight)
    verify(program)
    return program


def _action(item: Action | str) -> Action:
    return parse(item) if isinstance(item, str) else Action(*item)


def _load(path: str):  # type: ignore[no-untyped-def]  # whatever the user wrote
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"schedule {path!r} cannot be loaded: {error}; write \"package.module:function\"") from error
    if not callable(function):
        raise ValueError(f"schedule {path!r} is a {type(function).__name__}, not a function")
    return function


