"""The compute orders: for each rank, what is computed in which order. One schedule a file."""

from collections.abc import Callable
from dataclasses import dataclass

from ..actions import Row
from ..costs import Costs
from ..placement import Placement
from ._list_scheduler import PREFERENCES, Preference
from .alternating import ALTERNATING, alternating
from .backward_first import BACKWARD_FIRST, backward_first
from .breadth_first import breadth_first
from .gpipe import gpipe
from .half_memory import half_memory, half_memory_cap
from .interleaved_1f1b import interleaved_1f1b
from .one_f_one_b import one_f_one_b
from .third_memory import third_memory, third_memory_cap
from .zbv import zbv
from .zero_bubble import zero_bubble

Order = Callable[[Placement, int, float, Costs], tuple[Row, ...]]
"""(placement, micro_batches, max_in_flight, costs) -> one row of compute actions per rank."""


def _one_each(ranks: int, micro_batches: int) -> float:
    """What 1F1B holds on its fullest rank."""
    return ranks


def _everything(ranks: int, micro_batches: int) -> float:
    """For orders that hold every micro-batch by definition."""
    return max(micro_batches, 1)


@dataclass(frozen=True)
class Schedule:
    """A named compute order.

    ``is_split`` tells whether its backwards are split, ``uses_costs`` whether the order depends on costs;
    ``default_cap`` gives, from p and m, the activations that a rank may hold when the user sets no ``max_in_flight``;
    ``preferences`` are those of an order by the list scheduler.
    """

    order: Order
    is_split: bool = False
    uses_costs: bool = False
    default_cap: Callable[[int, int], float] = _one_each
    preferences: tuple[Preference, ...] = PREFERENCES


ORDERS: dict[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b),
    "interleaved_1f1b": Schedule(interleaved_1f1b),
    "backward_first": Schedule(backward_first, uses_costs=True, preferences=BACKWARD_FIRST),
    "alternating": Schedule(alternating, uses_costs=True, preferences=ALTERNATING),
    "breadth_first": Schedule(breadth_first, default_cap=_everything),
    "gpipe": Schedule(gpipe, default_cap=_everything),
    "zero_bubble": Schedule(zero_bubble, is_split=True, uses_costs=True),
    "zbv": Schedule(zbv, is_split=True, uses_costs=True),
    "half_memory": Schedule(half_memory, is_split=True, uses_costs=True, default_cap=half_memory_cap),
    "third_memory": Schedule(third_memory, is_split=True, uses_costs=True, default_cap=third_memory_cap),
}
