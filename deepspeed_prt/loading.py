"""Micro-batches that are moved to the device before they are needed."""

from collections.abc import Hashable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


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
            moved = self._move(data)
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

    def _move(self, data: Any) -> Any:
        if torch.is_tensor(data):
            return data.to(self._device, non_blocking=True)
        return [self._move(item) for item in data] if isinstance(data, (tuple, list)) else data


def _tensors(data: Any) -> list[torch.Tensor]:
    if torch.is_tensor(data):
        return [data]
    return [tensor for item in data for tensor in _tensors(item)] if isinstance(data, (tuple, list)) else []
