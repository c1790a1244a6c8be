"""Costs: how long things take."""

from dataclasses import dataclass
from functools import cached_property

from .actions import Action
from .placement import Placement


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch, per stage, and of a message; any unit, the same everywhere.

    ``backward``, the time of a whole backward, is the sum of its two halves, which take longer by the part
    ``splitting`` where they are apart. A message occupies its channel for
    ``transfer`` (its bytes over the bandwidth) and arrives ``latency`` after that. ``optimizer`` is each rank's time
    from its last action to the end of the step; as all ranks have it, it changes no order.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    latency: float = 0.0
    transfer: float = 0.0
    optimizer: float = 0.0
    splitting: float = 0.0

    @classmethod
    def uniform(cls, placement: Placement, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
                latency: float = 0.0, transfer: float = 0.0, optimizer: float = 0.0) -> "Costs":
        """Costs of equal stages from those of one micro-batch through all stages of one rank."""
        stages = placement.stages
        return cls((forward / placement.reuse, ) * stages, (input_grad / placement.reuse, ) * stages,
                   (weight_grad / placement.reuse, ) * stages, latency, transfer, optimizer)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """The time of a whole backward, per stage."""
        return tuple((a + b) / (1 + self.splitting) for a, b in zip(self.input_grad, self.weight_grad, strict=True))

    @cached_property
    def by_kind(self) -> dict[str, tuple[float, ...]]:
        """Times by kind of compute action, per stage."""
        return {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}

    @property
    def hop(self) -> float:
        """The time from a send to its arrival on a free channel."""
        return self.latency + self.transfer

    def of(self, action: Action) -> float:
        """The time that a compute action takes."""
        return self.by_kind[action.kind][action.stage]

    def work(self, stage: int) -> float:
        """The time that all compute actions of one micro-batch at ``stage`` take, with a whole backward."""
        return self.forward[stage] + self.backward[stage]
