"""Micro-batches on their way: all of a batch are read at once, and each is moved to the device ahead."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class BatchReader:
    """Reads all micro-batches of a batch before the first is used, also from an iterator that fills the same tensors.

    What an iterator gives is copied, until it has made new tensors for every micro-batch of a batch as large.
    """

    def __init__(self) -> None:
        self._iterator: Any = None
        self._apart = 0

    def read(self, iterator: Any, next_micro_batch: Callable[[], Any], micro_batches: int) -> list[Any]:
        """The next ``micro_batches`` of them.

        Args:
            iterator: where they come from.
            next_micro_batch: gives one (tensors, in tuples or lists) and may raise, StopIteration among others.
            micro_batches: how many to read.
        """
        if iterator is not self._iterator:
            self._iterator, self._apart = iterator, 0
        if micro_batches <= self._apart:
            return [next_micro_batch() for _ in range(micro_batches)]
        given, copies = [], []
        for _ in range(micro_batches):
            given.append(next_micro_batch())  # kept, so that no other gets its memory
            copies.append(_map(_copy, given[-1]))
        places = [place for data in given
                  for place in {tensor.data_ptr() for tensor in _tensors(data) if tensor.numel()}]
        if len(set(places)) == len(places):
            self._apart = micro_batches
        return copies


class LoadingAhead:
    """Copies on a stream of their own, so that one micro-batch travels while the one before is computed.

    The copies are asynchronous where the data are in pinned memory (``DataLoader(pin_memory=True)``).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = get_accelerator().Stream()
        self._moved: dict[Hashable, tuple[Any, Any]] = {}

    def start(self, key: Hashable, data: Any) -> None:
        """Start to move data (tensors, in tuples or lists, or None), unless it has been started."""
        if key in self._moved:
            return
        with get_accelerator().stream(self._stream):
            moved = _map(lambda tensor: tensor.to(self._device, non_blocking=True), data)
            arrived = get_accelerator().Event()
            arrived.record()
        self._moved[key] = moved, arrived

    def take(self, key: Hashable) -> Any:
        """What :meth:`start` was given, on the device, for the current stream to use; the host does not wait."""
        moved, arrived = self._moved.pop(key)
        current = get_accelerator().current_stream()
        current.wait_event(arrived)
        for tensor in _tensors(moved):
            # Its memory belongs to the other stream and must not be given away while this one uses it.
            tensor.record_stream(current)
        return moved

    def forget(self) -> None:
        """Drop what was moved and not taken."""
        self._moved.clear()


def _map(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """Data with something else in the place of each tensor."""
    if torch.is_tensor(data):
        return function(data)
    return [_map(function, item) for item in data] if isinstance(data, (tuple, list)) else data


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return copy.pin_memory() if tensor.is_pinned() else copy


def _tensors(data: Any) -> list[torch.Tensor]:
    if torch.is_tensor(data):
        return [data]
    return [tensor for item in data for tensor in _tensors(item)] if isinstance(data, (tuple, list)) else []
