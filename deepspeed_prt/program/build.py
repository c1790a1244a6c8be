"""From a schedule's name to its program."""

from .costs import Costs
from .orders import ORDERS
from .placement import Placement
from .program import Program, complete
from .search import search
from .split import split_backwards


def default_cap(schedule: str, ranks: int, micro_batches: int) -> float:
    """The activations a rank may hold when the user sets no ``max_in_flight``: what 1F1B holds on its fullest rank.

    Named orders that hold more or less by definition are taken at their word.
    """
    return ORDERS[schedule].default_cap(ranks, micro_batches) if schedule in ORDERS else ranks


def build(schedule: str, placement: Placement, micro_batches: int, max_in_flight: float | None = None,
          costs: Costs | None = None, split: bool | None = None, trials: int = 0) -> Program:
    """Make the program of a named schedule.

    Args:
        schedule: a key of :data:`~deepspeed_prt.program.orders.ORDERS`, or ``"auto"`` for the shortest of them.
        placement: ranks, reuse, route and direction.
        micro_batches: m, at least 1.
        max_in_flight: cap on the activations of a rank, in micro-batches of a whole rank; see :func:`default_cap`.
        costs: what orders that depend on costs assume; by default equal stages with F = I = W.
        split: split the backwards (True; with ``"auto"`` where that shortens the step), keep them whole (False), or as
            the schedule has it (None).
        trials: of ``"auto"``, and of named orders that depend on costs, which are searched for variations of their own
            then; see :func:`~deepspeed_prt.program.search.search`.

    Raises:
        ValueError: unknown schedule, no micro-batch, a cap that the schedule cannot keep, or a schedule that splits
            where ``split`` is False.
    """
    if micro_batches < 1:
        raise ValueError(f"a batch needs at least 1 micro-batch, got {micro_batches}")
    if schedule != "auto" and schedule not in ORDERS:
        raise ValueError(f"unknown schedule {schedule!r}: use one of auto, {', '.join(ORDERS)}")
    cap = default_cap(schedule, placement.ranks, micro_batches) if max_in_flight is None else max_in_flight
    if not cap >= 1:
        raise ValueError(f"max_in_flight {cap:g} is too small: a rank holds at least 1 micro-batch")
    costs = costs or Costs.uniform(placement)
    if schedule == "auto":
        return search(placement, micro_batches, cap, costs, split, trials)
    named = ORDERS[schedule]
    if named.is_split and split is False:
        raise ValueError(f"schedule {schedule!r} splits the backward, which split_backward false forbids; leave "
                         "split_backward out or choose another schedule")
    if trials and named.uses_costs:
        return search(placement, micro_batches, min(cap, default_cap(schedule, placement.ranks, micro_batches)), costs,
                      named.is_split or bool(split), trials, schedule)
    rows = named.order(placement, micro_batches, cap, costs)
    if split and not named.is_split:
        rows = split_backwards(rows)
    return complete(schedule, rows, placement, micro_batches, cap)
