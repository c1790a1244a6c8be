"""The program: what every rank does in one batch, and how the passes make it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .actions import FORWARD, GIVES_WEIGHT_GRAD, INPUT_GRAD, Action, Row
from .communication import add_communication
from .placement import Placement
from .slots import Slots, assign_slots


@dataclass(frozen=True)
class Program:
    """One row of actions per rank, with the slot of each (stage, micro-batch) that the rank holds."""

    schedule: str
    placement: Placement
    micro_batches: int
    max_in_flight: float
    rows: tuple[Row, ...]
    slots: tuple[Slots, ...]

    @cached_property
    def has_backward(self) -> bool:
        """Whether the program trains; a forward-only one evaluates."""
        return any(action.kind not in ("F", "SEND_F", "RECV_F") for row in self.rows for action in row)

    @cached_property
    def is_split(self) -> bool:
        """Whether any backward is done in two halves."""
        return bool(self.split_stages)

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages of which any backward is done in two halves."""
        return frozenset(action.stage for row in self.rows for action in row if action.kind == INPUT_GRAD)

    def num_slots(self, rank: int) -> int:
        """How many pipe buffers ``rank`` needs."""
        return max(self.slots[rank].values(), default=-1) + 1

    def compute_rows(self) -> tuple[Row, ...]:
        """The rows without sends and receives."""
        return tuple(tuple(action for action in row if action.is_compute) for row in self.rows)

    def peak_in_flight(self, rank: int) -> float:
        """The most activations that ``rank`` holds at once, in micro-batches of a whole rank (``reuse`` stages)."""
        return peak_held(self.rows[rank]) / self.placement.reuse

    @cached_property
    def peak(self) -> float:
        """The most that any rank holds at once, as :meth:`peak_in_flight` counts."""
        return max(self.peak_in_flight(rank) for rank in range(self.placement.ranks))


def count_splits(rows: Iterable[Row]) -> int:
    """How many backwards are done in two halves."""
    return sum(action.kind == INPUT_GRAD for row in rows for action in row)


def peak_held(row: Iterable[Action]) -> int:
    """The most activations that a rank holds at once, in (stage, micro-batch) pairs."""
    held = peak = 0
    for action in row:
        if action.kind == FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind in GIVES_WEIGHT_GRAD:
            held -= 1
    return peak


def complete(schedule: str, compute_rows: Sequence[Row], placement: Placement, micro_batches: int,
             max_in_flight: float) -> Program:
    """Run the passes that follow the compute order: communication, then slots."""
    rows = add_communication(compute_rows, placement)
    return Program(schedule, placement, micro_batches, max_in_flight, rows, assign_slots(rows, placement))


def forward_only(program: Program) -> Program:
    """The evaluation program: the same forwards in the same order, and nothing else."""
    rows = tuple(
        tuple(Action(stage, kind, micro_batch) for stage, kind, micro_batch in row if kind == FORWARD)
        for row in program.compute_rows())
    return complete(program.schedule, rows, program.placement, program.micro_batches, program.max_in_flight)
