"""The compute orders: for each rank, which forwards and backwards run in which order. One schedule a file."""

from collections.abc import Callable

from ..actions import Row
from ..placement import Placement
from .breadth_first import breadth_first
from .gpipe import gpipe
from .interleaved_1f1b import interleaved_1f1b
from .one_f_one_b import one_f_one_b

Order = Callable[[Placement, int, float], tuple[Row, ...]]
"""(placement, micro_batches, max_in_flight) -> one row of compute actions per rank."""

ORDERS: dict[str, Order] = {
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "breadth_first": breadth_first,
    "gpipe": gpipe,
}

HOLD_EVERYTHING = frozenset({"gpipe", "breadth_first"})
"""Orders that hold every micro-batch by definition; the default cap on activations in flight is m for them."""
