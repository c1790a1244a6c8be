"""What is loaded ahead, and channels with groups of their own: what a GPU needs, as far as a CPU can show it."""

from typing import Any

import deepspeed
import pytest
import torch.distributed as dist

from . import training
from .training import config


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
