"""An emulated link: every message between two ranks counts as arrived a set time after it was sent.

Each message carries the time at which it was sent, and the receiver's wait returns no earlier than the latency after
that. So the sender is not held up, a message may be under way while its receiver computes, and messages do not queue
behind each other. It sits below all contenders, in the two methods of a process group that torch, DeepSpeed and
deepspeed_prt all send and receive with. The clock is the machine's, so all ranks have to be on one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_STAMP_BYTES = 8


@contextmanager
def emulated_link(latency_s: float) -> Iterator[None]:
    """Delay all point-to-point messages in this block, which all ranks have to enter; nothing changes with 0."""
    if latency_s == 0:
        yield
        return
    real_send, real_recv = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def send(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> dist.Work:
        return real_send(group, [_stamped(tensors[0])], *args)

    def recv(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> _Arrival:
        arrival = _Arrival(tensors[0], latency_s)
        arrival.work = real_recv(group, [arrival.message], *args)
        return arrival

    dist.ProcessGroup.send, dist.ProcessGroup.recv = send, recv
    try:
        yield
    finally:
        dist.ProcessGroup.send, dist.ProcessGroup.recv = real_send, real_recv


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
            self._unpack()
        return True

    def _unpack(self) -> None:
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
