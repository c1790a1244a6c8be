"""What every contender trains: the same layers from the same weights, the same data, loss and optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import nn

SEED = 1234
LEARNING_RATE = 1e-3
"""Of AdamW, whose other settings are torch's."""

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """Layers, a loss of (outputs, labels), and micro-batches of ``rows`` rows without end, from the first one on."""

    layers: list[LayerSpec]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: Callable[[], Iterator[MicroBatch]]
    rows: int

    def build(self, start: int, stop: int) -> list[nn.Module]:
        """Build some layers, with the weights that PipelineModule gives them under ``seed_layers``."""
        built = []
        for index in range(start, stop):
            set_random_seed(SEED + index)
            built.append(self.layers[index].build())
        return built
