"""The pass that splits whole backwards into their two halves."""

from collections.abc import Sequence

from .actions import BACKWARD, INPUT_GRAD, WEIGHT_GRAD, Row


def split_backwards(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Each B becomes I and W, in its place: the gradient of the input leaves before the weights' are computed.

    ``0F0 0B0`` gives ``0F0 0I0 0W0``.
    """
    return tuple(
        tuple(half for action in row
              for half in ((action._replace(kind=INPUT_GRAD), action._replace(kind=WEIGHT_GRAD))
                           if action.kind == BACKWARD else (action, )))
        for row in rows)
