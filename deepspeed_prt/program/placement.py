"""Placement: which rank runs which stage, for each pipe."""

from dataclasses import dataclass
from functools import cached_property

PLACEMENTS = ("loop", "wave")
DIRECTIONS = ("unidirectional", "bidirectional")

DOWN, UP = 0, 1
"""The pipes: ``down`` enters at rank 0, ``up`` (bidirectional only) at rank p-1."""


@dataclass(frozen=True)
class Placement:
    """The routes that micro-batches take over ``ranks`` pipeline ranks with ``reuse`` stages on each, per pipe.

    ``loop`` puts stage s on rank s mod p (Megatron-LM's interleaving). ``wave`` goes there and back, 0..p-1, p-1..0
    and so on, so that the turning points stay on one rank (Hanayo's waves; with reuse 2 a V). A bidirectional
    placement has a second pipe, the mirror of the first, and micro-batches take them in turn: with reuse 1 that is
    Chimera's, with a wave of reuse 2 BitPipe's.

    Raises:
        ValueError: an unknown name, fewer than one rank or stage, or two pipes on one rank.
    """

    name: str
    ranks: int
    reuse: int
    direction: str = "unidirectional"

    def __post_init__(self) -> None:
        if self.name not in PLACEMENTS:
            raise ValueError(f"unknown placement {self.name!r}: use one of {', '.join(PLACEMENTS)}")
        if self.direction not in DIRECTIONS:
            raise ValueError(f"unknown direction {self.direction!r}: use one of {', '.join(DIRECTIONS)}")
        if self.ranks < 1:
            raise ValueError(f"a pipeline needs at least 1 rank, got {self.ranks}")
        if self.reuse < 1:
            raise ValueError(f"reuse is the number of stages per rank and must be at least 1, got {self.reuse}")
        if self.direction == "bidirectional" and self.ranks == 1:
            raise ValueError("a bidirectional pipeline needs at least 2 ranks to run in both directions, got 1; "
                             "use direction 'unidirectional'")

    @cached_property
    def stages(self) -> int:
        """The number of stages the model is cut into, p*v."""
        return self.ranks * self.reuse

    @cached_property
    def pipes(self) -> int:
        """1, or 2 in a bidirectional placement."""
        return 2 if self.direction == "bidirectional" else 1

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """For each pipe the rank of each stage, in the order a micro-batch meets them."""
        there = range(self.ranks)
        back = range(self.ranks - 1, -1, -1)
        lap = (there, there) if self.name == "loop" else (there, back)
        down = tuple(rank for lap_index in range(self.reuse) for rank in lap[lap_index % 2])
        up = tuple(self.mirror(rank) for rank in down)
        return (down, up)[:self.pipes]

    @cached_property
    def _stages_of(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(stage for stage, at in enumerate(route) if at == rank) for rank in range(self.ranks))
            for route in self.routes)

    @cached_property
    def _remote(self) -> tuple[bool, ...]:
        down = self.routes[DOWN]
        return (False, *(below != above for below, above in zip(down, down[1:], strict=False)))

    def mirror(self, rank: int) -> int:
        """The rank that takes ``rank``'s place in the other pipe, and so holds the same stages in all."""
        return self.ranks - 1 - rank

    def pipe_of(self, micro_batch: int) -> int:
        """The pipe of a micro-batch; they alternate, the first one down."""
        return micro_batch % self.pipes

    def rank_of(self, stage: int, pipe: int = DOWN) -> int:
        """The rank that runs ``stage`` of ``pipe``."""
        return self.routes[pipe][stage]

    def stages_of(self, rank: int, pipe: int = DOWN) -> tuple[int, ...]:
        """The stages that ``rank`` runs in ``pipe``, in route order; there are ``reuse`` of them."""
        return self._stages_of[pipe][rank]

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds for any pipe, in order."""
        return tuple(sorted({stage for of_pipe in self._stages_of for stage in of_pipe[rank]}))

    def visits_of(self, rank: int, micro_batches: int) -> list[tuple[int, int]]:
        """The (stage, micro-batch) pairs that ``rank`` computes; ``reuse`` for each micro-batch."""
        return [(stage, micro_batch) for micro_batch in range(micro_batches)
                for stage in self._stages_of[micro_batch % self.pipes][rank]]

    def is_remote(self, stage: int) -> bool:
        """Whether the boundary below ``stage`` (between stage - 1 and stage) joins two ranks, in every pipe alike."""
        return 0 < stage < self.stages and self._remote[stage]
