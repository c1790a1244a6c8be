"""The program: what every rank does in one batch, and how the passes make it."""

from collections.abc import Sequence
from dataclasses import dataclass

from .actions import FORWARD, Action, Row
from .communication import add_communication
from .orders import HOLD_EVERYTHING, ORDERS
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

    @property
    def has_backward(self) -> bool:
        """Whether the program trains; a forward-only one evaluates."""
        return any(action.kind not in ("F", "SEND_F", "RECV_F") for row in self.rows for action in row)

    def num_slots(self, rank: int) -> int:
        """How many pipe buffers ``rank`` needs."""
        return max(self.slots[rank].values(), default=-1) + 1

    def compute_rows(self) -> tuple[Row, ...]:
        """The rows without sends and receives."""
        return tuple(tuple(action for action in row if action.is_compute) for row in self.rows)

    def peak_in_flight(self, rank: int) -> float:
        """The most activations that ``rank`` holds at once, in micro-batches of a whole rank (``reuse`` stages)."""
        held = peak = 0
        for action in self.rows[rank]:
            if action.kind == "F":
                held += 1
                peak = max(peak, held)
            elif action.kind in ("B", "W"):
                held -= 1
        return peak / self.placement.reuse


def default_cap(schedule: str, ranks: int, micro_batches: int) -> float:
    """The activations a rank may hold when the user sets no ``max_in_flight``: what 1F1B holds on its fullest rank.

    Orders that hold every micro-batch by definition are taken at their word.
    """
    return max(micro_batches, 1) if schedule in HOLD_EVERYTHING else ranks


def complete(schedule: str, compute_rows: Sequence[Row], placement: Placement, micro_batches: int,
             max_in_flight: float) -> Program:
    """Run the passes that follow the compute order: communication, then slots."""
    rows = add_communication(compute_rows, placement)
    return Program(schedule, placement, micro_batches, max_in_flight, rows, assign_slots(rows, placement))


def build(schedule: str, placement: Placement, micro_batches: int, max_in_flight: float | None = None) -> Program:
    """Make the program of a named schedule; ``"auto"`` is 1F1B, interleaved where a rank has several stages.

    Args:
        schedule: a key of :data:`~deepspeed_prt.program.orders.ORDERS`, or ``"auto"``.
        placement: ranks, reuse and route.
        micro_batches: m, at least 1.
        max_in_flight: cap on the activations of a rank, in micro-batches of a whole rank; see :func:`default_cap`.

    Raises:
        ValueError: unknown schedule, no micro-batch, or a cap that the schedule cannot keep.
    """
    if micro_batches < 1:
        raise ValueError(f"a batch needs at least 1 micro-batch, got {micro_batches}")
    if schedule == "auto":
        schedule = "1f1b" if placement.reuse == 1 else "interleaved_1f1b"
    if schedule not in ORDERS:
        raise ValueError(f"unknown schedule {schedule!r}: use one of {', '.join(ORDERS)}")
    cap = default_cap(schedule, placement.ranks, micro_batches) if max_in_flight is None else max_in_flight
    compute_rows = ORDERS[schedule](placement, micro_batches, cap)
    return complete(schedule, compute_rows, placement, micro_batches, cap)


def forward_only(program: Program) -> Program:
    """The evaluation program: the same forwards in the same order, and nothing else."""
    rows = tuple(
        tuple(Action(stage, kind, micro_batch) for stage, kind, micro_batch in row if kind == FORWARD)
        for row in program.compute_rows())
    return complete(program.schedule, rows, program.placement, program.micro_batches, program.max_in_flight)
