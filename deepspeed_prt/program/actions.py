"""Actions: what one pipeline rank does, one at a time, and how they are written.

The notation is that of torch.distributed.pipelining's CSV files: ``2F0`` is the forward of micro-batch 0 through
stage 2, ``1SEND_F0`` the hand-over of its input by stage 1 and ``2RECV_F0`` the arrival at stage 2.
"""

import re
from typing import Final, Literal, NamedTuple, get_args

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT_GRAD: Final = "I"
WEIGHT_GRAD: Final = "W"
SEND_F: Final = "SEND_F"
RECV_F: Final = "RECV_F"
SEND_B: Final = "SEND_B"
RECV_B: Final = "RECV_B"

COMPUTE_KINDS: Final[frozenset[Kind]] = frozenset({"F", "B", "I", "W"})
GIVES_INPUT_GRAD: Final[frozenset[Kind]] = frozenset({"B", "I"})
"""The kinds that need the gradient of a stage's output and give that of its input."""
GIVES_WEIGHT_GRAD: Final[frozenset[Kind]] = frozenset({"B", "W"})
"""The kinds that give the gradients of a stage's weights, after which it holds nothing of the micro-batch."""

_PATTERN = re.compile(rf"(0|[1-9][0-9]*)({'|'.join(get_args(Kind))})(0|[1-9][0-9]*)")


class Action(NamedTuple):
    """One step of a rank: what is done, at which stage, for which micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def is_compute(self) -> bool:
        """Whether the action occupies the rank, as sends and receives do not."""
        return self.kind in COMPUTE_KINDS


Row = tuple[Action, ...]


def parse(text: str) -> Action:
    """Read one action; the whole string has to match, so ``parse(str(action)) == action`` and nothing else passes.

    Raises:
        ValueError: the text is not an action.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action: write stage, kind and micro-batch, as in '2F0' or '1SEND_B3'; "
                         f"the kinds are {', '.join(get_args(Kind))}")
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), kind, int(micro_batch))  # type: ignore[arg-type]  # the pattern admits only kinds


def parse_row(text: str) -> Row:
    """Read the actions of one rank, separated by white space."""
    return tuple(parse(word) for word in text.split())


def format_row(row: Row) -> str:
    """Write the actions of one rank, separated by single spaces."""
    return " ".join(map(str, row))
