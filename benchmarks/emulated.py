"""Emulated devices: layers whose compute is a real sleep that a split backward splits, and what a rank holds of them.

A layer sleeps in its forward, on the way back to its input, and on the way back to its weight, until each has taken its
set time; the little that it computes is part of that. The sleep for the weight is on the way to it from the layer's
``weight``: nn.Linear's own forward runs, and its weight gradient can be deferred as any.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from .settings import Emulation
from .work import MicroBatch, Work

ROWS = 4
_PR_SET_TIMERSLACK = 29


def emulated_work(emulation: Emulation) -> Work:
    """The layers, and data that does not matter."""
    seconds = [ms / 1000 / emulation.layers_per_rank
               for ms in (emulation.forward_ms, emulation.input_grad_ms, emulation.weight_grad_ms)]
    _settle_on_a_core()

    def batches() -> Iterator[MicroBatch]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield (torch.randn(ROWS, emulation.width, generator=generator),
                   torch.randn(ROWS, emulation.width, generator=generator))

    return Work([LayerSpec(EmulatedLayer, emulation.width, *seconds) for _ in range(emulation.layers)],
                nn.functional.mse_loss, batches, ROWS)


def _settle_on_a_core() -> None:
    """Let this process disturb others, and be disturbed, as little as if it had a core of its own.

    The kernel may round each sleep up by 50 microseconds, which adds up over many short ones. Ranks that have to share
    cores stay on theirs, as with DeepSpeed's ``--bind_cores_to_rank``, and one that wakes interrupts none that runs:
    either would cost them what is in the caches.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    cores = sorted(os.sched_getaffinity(0))  # only its own from the second contender on
    core = cores[dist.get_rank() % len(cores)]
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, {core})
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


class Device:
    """This process as a device: it keeps busy for set times, and meters what it holds for backwards to come.

    A layer is held from its forward until its weight's gradient is done. Activations are the inputs and outputs of
    layers, each counted while its storage exists, whoever keeps it.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._late = 0.0
        self.forget_activations()
        self.start()

    def forget_activations(self) -> None:
        """Count no more what another contender has left behind."""
        self._alive: dict[int, int] = {}

    def start(self) -> None:
        """Forget the peaks, and layers that have been run without a backward."""
        self.busy = 0.0
        self._layers = self.peak_layers = self.peak_bytes = 0

    def begin(self) -> None:
        """What follows, up to the next :meth:`finish`, is part of that time."""
        self._began = time.perf_counter()

    def finish(self, seconds: float) -> None:
        """Sleep until ``seconds`` have passed since :meth:`begin`, or from now on if nothing has begun.

        No sleep ends on time; what one takes longer, the next one takes less.
        """
        self.busy += seconds
        end = (self._began or time.perf_counter()) + seconds - self._late
        time.sleep(max(0.0, end - time.perf_counter()))
        self._late = min(time.perf_counter() - end, seconds)
        self._began = None

    def hold(self, *activations: torch.Tensor) -> None:
        """A layer has been run."""
        self._layers += 1
        self.peak_layers = max(self.peak_layers, self._layers)
        for activation in activations:
            storage = activation.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        # A copy, since threads that send free storages meanwhile.
        self.peak_bytes = max(self.peak_bytes, sum(list(self._alive.values())))

    def release(self) -> None:
        """A layer's gradients are complete."""
        self._layers -= 1


DEVICE = Device()
"""Of this process, as layers move between processes and are built anew."""


class EmulatedLayer(nn.Module):
    """A linear layer that takes set times for its forward, its input's gradient and its weight's gradient."""

    def __init__(self, width: int, forward_s: float, input_grad_s: float, weight_grad_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.input_grad_s = input_grad_s
        self.linear = _EmulatedLinear(width, weight_grad_s)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        DEVICE.begin()
        if torch.is_grad_enabled() and not inputs.requires_grad:
            # The first layer's input gradient takes its time too, also where the data require none.
            inputs = inputs.detach().requires_grad_()
        outputs = _Leave.apply(self.linear(_Enter.apply(inputs, self.input_grad_s)))
        DEVICE.hold(inputs, outputs)
        DEVICE.finish(self.forward_s)
        return outputs


class _Enter(torch.autograd.Function):
    """Identity; its backward is the end of the way to the layer's input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        DEVICE.finish(ctx.seconds)
        return gradient, None


class _Leave(torch.autograd.Function):
    """Identity; its backward is the begin of the layer's."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(outputs)  # so that what comes out is no view: torch's stages detach their outputs in place
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        DEVICE.begin()
        return gradient


class _EmulatedLinear(nn.Linear):
    """nn.Linear without a bias, whose ``weight`` is the parameter ``origin``, a way off."""

    def __init__(self, width: int, weight_grad_s: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a weight
        self.in_features = self.out_features = width
        self.register_parameter("bias", None)
        # The default would shrink the signal of many layers to nothing.
        self.origin = nn.Parameter(torch.eye(width))
        self.weight_grad_s = weight_grad_s

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return _EnterWeight.apply(super().__getattr__("origin"), self.weight_grad_s)
        return super().__getattr__(name)


class _EnterWeight(torch.autograd.Function):
    """Identity; its backward is the end of the way to the layer's weight, and of the layer's."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        DEVICE.finish(ctx.seconds)
        DEVICE.release()
        return gradient, None
