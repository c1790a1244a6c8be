"""An emulated link: every message between two ranks counts as arrived a set time after it was sent.

Each message carries the time at which it was sent, and the receiver's wait returns no earlier than the latency after
that. So the sender is not held up, a message may be under way while its receiver computes, and messages do not queue
behind each other. It sits below all contenders, in the four functions that torch, DeepSpeed and deepspeed_prt all send
with. The clock is the machine's, so all ranks have to be on one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_STAMP_BYTES = 8


@contextmanager
def emulated_link(latency_s: float) -> Iterator[None]:
    """Delay all point-to-point messages in this block, which all ranks have to enter; nothing changes with 0."""
    if latency_s == 0:
        yield
        return
    real = {name: getattr(dist, name) for name in ("isend", "irecv", "send", "recv")}

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> dist.Work:
        return real["isend"](_stamped(tensor), *args, **kwargs)

    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        real["send"](_stamped(tensor), *args, **kwargs)

    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> _Arrival:
        arrival = _Arrival(tensor, latency_s)
        arrival.work = real["irecv"](arrival.message, *args, **kwargs)
        return arrival

    def recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
        arrival = _Arrival(tensor, latency_s)
        source = real["recv"](arrival.message, *args, **kwargs)
        arrival.unpack()
        return source

    try:
        _install({"isend": isend, "irecv": irecv, "send": send, "recv": recv})
        yield
    finally:
        _install(real)


def _install(functions: dict[str, Any]) -> None:
    for module in (dist, distributed_c10d):
        for name, function in functions.items():
            setattr(module, name, function)


class _Arrival:
    """A receive on its way."""

    work: dist.Work

    def __init__(self, tensor: torch.Tensor, latency_s: float) -> None:
        self.message = torch.empty(tensor.nbytes + _STAMP_BYTES, dtype=torch.uint8)
        self._tensor = tensor
        self._latency_s = latency_s
        self._is_unpacked = False

    def wait(self) -> bool:
        """As a Work's; it may be called again."""
        if not self._is_unpacked:
            self.work.wait()
            self.unpack()
        return True

    def unpack(self) -> None:
        """Wait until the message counts as arrived, and put it where it was wanted."""
        sent = self.message[-_STAMP_BYTES:].clone().view(torch.float64).item()
        time.sleep(max(0.0, sent + self._latency_s - time.monotonic()))
        _as_bytes(self._tensor).copy_(self.message[:-_STAMP_BYTES])
        self._is_unpacked = True


def _stamped(tensor: torch.Tensor) -> torch.Tensor:
    """The message: the tensor's bytes and the time."""
    now = torch.tensor([time.monotonic()], dtype=torch.float64)
    return torch.cat([_as_bytes(tensor.contiguous()), now.view(torch.uint8)])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
