"""Placement: which rank runs which stage."""

from dataclasses import dataclass
from functools import cached_property

PLACEMENTS = ("loop", "wave")


@dataclass(frozen=True)
class Placement:
    """The routes that micro-batches take over ``ranks`` pipeline ranks with ``reuse`` stages on each.

    ``loop`` puts stage s on rank s mod p (Megatron-LM's interleaving). ``wave`` goes there and back, 0..p-1, p-1..0
    and so on, so that the turning points stay on one rank (Hanayo's waves; with reuse 2 a V).

    Raises:
        ValueError: an unknown name, or fewer than one rank or stage.
    """

    name: str
    ranks: int
    reuse: int

    def __post_init__(self) -> None:
        if self.name not in PLACEMENTS:
            raise ValueError(f"unknown placement {self.name!r}: use one of {', '.join(PLACEMENTS)}")
        if self.ranks < 1:
            raise ValueError(f"a pipeline needs at least 1 rank, got {self.ranks}")
        if self.reuse < 1:
            raise ValueError(f"reuse is the number of stages per rank and must be at least 1, got {self.reuse}")

    @cached_property
    def stages(self) -> int:
        """The number of stages the model is cut into, p*v."""
        return self.ranks * self.reuse

    @cached_property
    def route(self) -> tuple[int, ...]:
        """The rank of each stage, in the order a micro-batch meets them."""
        there = range(self.ranks)
        back = range(self.ranks - 1, -1, -1)
        lap = (there, there) if self.name == "loop" else (there, back)
        return tuple(rank for lap_index in range(self.reuse) for rank in lap[lap_index % 2])

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        stages: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.route):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def _remote(self) -> tuple[bool, ...]:
        return (False, *(below != above for below, above in zip(self.route, self.route[1:], strict=False)))

    def rank_of(self, stage: int) -> int:
        """The rank that runs ``stage``."""
        return self.route[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` runs, in route order; there are ``reuse`` of them."""
        return self._stages_of[rank]

    def is_remote(self, stage: int) -> bool:
        """Whether the boundary below ``stage`` (between stage - 1 and stage) joins two ranks."""
        return 0 < stage < self.stages and self._remote[stage]
