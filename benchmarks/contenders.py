"""Who is compared: each contender's name, whose code runs it, and what that is told."""

from collections.abc import Sequence
from typing import Any, NamedTuple

OURS = "deepspeed_prt"
BASELINE = "deepspeed 1F1B"

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Contender(NamedTuple):
    """``library`` is ``deepspeed`` or ``torch``; ``options`` go to its ``build``."""

    name: str
    library: str
    options: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        """Whether it is to be compared with peers, rather than one of them."""
        return self.name.startswith(OURS)


def contenders(torch_reuse: int, our_reuse: Sequence[int]) -> list[Contender]:
    """All contenders.

    Args:
        torch_reuse: stages a rank of torch's schedules that run several.
        our_reuse: stages a rank, and a pipe, of ours.
    """
    return [*_deepspeed(), *_torch(torch_reuse), *_ours(our_reuse), *_ours_by_schedule()]


def _deepspeed() -> list[Contender]:
    return [Contender(BASELINE, "deepspeed", {}), Contender("deepspeed DualPipeV", "deepspeed", {"dualpipev": True})]


def _torch(reuse: int) -> list[Contender]:
    rows = [Contender("torch 1F1B", "torch", {"schedule": "Schedule1F1B", "reuse": 1})]
    rows += [Contender(f"torch {name} v={reuse}", "torch", {"schedule": f"Schedule{name}", "reuse": reuse})
             for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")]
    rows += [Contender(f"torch {name}", "torch", {"schedule": f"Schedule{name}", "reuse": 2, "placement": "v"})
             for name in _V_SHAPED]
    return rows


def _ours(reuse: Sequence[int]) -> list[Contender]:
    loops = [_ours_by_search(direction, "loop", v, split)
             for direction in ("unidirectional", "bidirectional") for v in reuse for split in (False, True)]
    # Where messages take time, a wave has an advantage in one direction; in both there is hardly any.
    return loops + [_ours_by_search("unidirectional", "wave", v, True) for v in reuse if v > 1]


def _ours_by_search(direction: str, placement: str, reuse: int, split: bool) -> Contender:
    route = direction if placement == "loop" else f"{direction} {placement}"
    return Contender(f"{OURS} {route} v={reuse} {'split' if split else 'whole'}", "deepspeed",
                     {"prt": {"direction": direction, "reuse": reuse, "placement": placement, "split_backward": split,
                              "schedule": "auto"}})


def _ours_by_schedule() -> list[Contender]:
    schedules = (("zero_bubble", "loop", 1), ("zbv", "wave", 2), ("half_memory", "loop", 4),
                 ("third_memory", "loop", 4))
    return [Contender(f"{OURS} {name} v={v}", "deepspeed",
                      {"prt": {"reuse": v, "placement": placement, "schedule": name}})
            for name, placement, v in schedules]
