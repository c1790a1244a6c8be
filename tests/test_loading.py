"""What is loaded ahead, and channels with groups of their own: what a GPU needs, as far as a CPU can show it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from deepspeed_prt.loading import BatchReader

from . import training
from .training import config


def refilling(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of consecutive numbers, in ``count`` pairs of tensors that take turns."""
    pairs = [(torch.zeros(1), torch.zeros(1)) for _ in range(count)]
    for number in itertools.count():
        inputs, labels = pairs[number % count]
        yield inputs.fill_(number), labels.fill_(-number)


def numbers(micro_batches: list[Any]) -> list[float]:
    assert all(labels.item() == -inputs.item() for inputs, labels in micro_batches)
    return [inputs.item() for inputs, _ in micro_batches]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_iterator_that_fills_the_same_tensors_again(count):
    reader, iterator = BatchReader(), refilling(count)
    for first, last in ((0, 3), (3, 6), (6, 10), (10, 14), (14, 16)):
        assert numbers(reader.read(iterator, iterator.__next__, last - first)) == list(range(first, last))


def test_what_an_iterator_makes_anew_is_not_copied_after_the_first_batch():
    given: list[Any] = []

    def gives(make: Callable[[], Any]) -> Iterator[Any]:
        while True:
            given.append(make())
            yield given[-1]

    def are_copies(micro_batches: int, iterator: Iterator[Any]) -> list[bool]:
        given.clear()
        read = reader.read(iterator, iterator.__next__, micro_batches)
        return [mine is not theirs for mine, theirs in zip(read, given, strict=True)]

    reader = BatchReader()
    iterator = gives(lambda: (torch.zeros(2), [torch.zeros(2), torch.zeros(0)]))
    assert are_copies(3, iterator) == [True] * 3
    assert are_copies(3, iterator) == are_copies(2, iterator)[:1] * 3 == [False] * 3
    assert are_copies(4, iterator) == [True] * 4, "more than were seen to lie apart"
    assert are_copies(4, iterator) == [False] * 4
    assert are_copies(2, gives(lambda: (torch.zeros(2), ))) == [True] * 2, "another iterator"
    whole = torch.zeros(8)
    slices = gives(lambda: (whole[2 * len(given):][:2], whole[2 * len(given):][:2]))
    assert are_copies(3, slices) == [True] * 3
    assert are_copies(3, slices) == [False] * 3, "inputs and labels may be one tensor, and all parts of one"


class Recorder:
    """Moves nothing, and notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._data: dict[tuple[int, int], Any] = {}

    def start(self, key: tuple[int, int], data: tuple[Any, Any]) -> None:
        if key not in self._data:
            self.calls.append("start {1} for stage {0}: ".format(*key) + " and ".join(
                name for name, part in zip(("inputs", "labels"), data, strict=True) if part is not None))
        self._data[key] = data

    def take(self, key: tuple[int, int]) -> tuple[Any, Any]:
        self.calls.append("take {1} for stage {0}".format(*key))
        return self._data.pop(key)

    def forget(self) -> None:
        assert not self._data, "everything that was moved is taken"


def recorded(prt: dict[str, Any]) -> tuple[list[str], list[float]]:
    module = training.build("blocks", 2)
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    engine._loading_ahead = recorder = Recorder()
    iterator = training.data("blocks", engine)
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    return recorder.calls[:len(recorder.calls) // 2], losses


def losses_alone(prt: dict[str, Any] | None) -> list[float]:
    return training.train("blocks", 2, config(3, prt=prt), steps=2)["losses"]


def test_one_micro_batch_ahead(world):
    (first, losses), (last, _) = world(2).run(recorded, {"reuse": 2, "schedule": "interleaved_1f1b"})
    assert first == ["start 0 for stage 0: inputs", "take 0 for stage 0",
                     "start 1 for stage 0: inputs", "take 1 for stage 0",
                     "start 2 for stage 0: inputs", "take 2 for stage 0"]
    assert last == ["start 0 for stage 3: labels", "take 0 for stage 3",
                    "start 1 for stage 3: labels", "take 1 for stage 3",
                    "start 2 for stage 3: labels", "take 2 for stage 3"]
    assert losses == world(2).run(losses_alone, None)[0]


def test_in_both_directions_the_next_one_of_the_same_pipe(world):
    (first, _), _ = world(2).run(recorded, {"reuse": 1, "direction": "bidirectional", "schedule": "backward_first"})
    assert [call for call in first if "stage 0" in call] == [
        "start 0 for stage 0: inputs", "take 0 for stage 0", "start 2 for stage 0: inputs", "take 2 for stage 0"]
    assert [call for call in first if "stage 1" in call] == ["start 1 for stage 1: labels", "take 1 for stage 1"]


def with_own_groups(prt: dict[str, Any]) -> list[float]:
    real = dist.get_backend
    dist.get_backend = lambda group=None: "another"
    try:
        return losses_alone(prt)
    finally:
        dist.get_backend = real


@pytest.mark.parametrize("prt", [{"reuse": 2}, {"reuse": 2, "placement": "wave"},
                                 {"reuse": 2, "direction": "bidirectional"}], ids=["loop", "wave", "both"])
def test_each_channel_has_a_group_of_its_own_on_other_backends_than_gloo(world, prt):
    assert world(2).run(with_own_groups, prt) == world(2).run(losses_alone, prt)
