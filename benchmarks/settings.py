"""What is trained, as plain numbers; importing this costs nothing."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Emulation:
    """Layers that sleep. Times are of one micro-batch through all layers of one rank.

    ``width`` floats a row cross between layers.
    """

    ranks: int
    layers: int
    width: int
    forward_ms: float
    input_grad_ms: float
    weight_grad_ms: float
    latency_ms: float

    @property
    def layers_per_rank(self) -> float:
        """All contenders give each rank as many."""
        return self.layers / self.ranks

    def ideal_ms(self, micro_batches: int) -> float:
        """A step without any bubble."""
        return micro_batches * (self.forward_ms + self.input_grad_ms + self.weight_grad_ms)


@dataclass(frozen=True)
class Reviews:
    """The example BERT on the example's reviews, with real compute."""

    cache_dir: Path
    model: str = "tiny"
    seq_len: int = 64
    rows: int = 32
    latency_ms: float = 0.0
