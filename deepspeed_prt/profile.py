"""What the stages of a rank really take, measured in batches as they run."""

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from .program.calibration import costs_of_stages, fit_latency
from .program.costs import Costs
from .program.program import Program


class Measurement(NamedTuple):
    """Of one rank, in milliseconds."""

    times: dict[tuple[str, int], float]
    """The median time of F, I and W of each stage, with what the host does for them before it waits again.

    A whole backward is an I with a W that takes no time.
    """
    batches: tuple[float, ...]
    """From each batch's start to its end on all ranks."""


class Profile:
    """Times each compute action of some batches: on the CPU by the host's clock, elsewhere by the device's events."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self._batches: list[float] = []
        self._finished_marks = 0
        self._running: tuple[tuple[str, int], Any] | None = None
        self._marks: list[tuple[tuple[str, int], Any, Any]] = []

    def start_batch(self) -> None:
        """All ranks start a batch about now."""
        self._start = time.perf_counter()

    def begin(self, kind: str, stage: int) -> None:
        """An action starts: what it needs is there."""
        self.end()
        self._running = (kind, stage), self._mark()

    def end(self) -> None:
        """The running action is over, if there is one: the host turns to the next, or waits."""
        if self._running is not None:
            self._marks.append((*self._running, self._mark()))
            self._running = None

    def finish_batch(self) -> None:
        """All ranks' actions are over, and none has failed; waits for the device."""
        self.end()
        if not self._is_host:
            get_accelerator().synchronize()
        self._finished_marks = len(self._marks)
        self._batches.append(1000 * (time.perf_counter() - self._start))

    def forget_batch(self) -> None:
        """The batch failed."""
        self._running = None
        del self._marks[self._finished_marks:]

    @property
    def batches(self) -> tuple[float, ...]:
        """The batches so far, as in :class:`Measurement`."""
        return tuple(self._batches)

    def measurement(self) -> Measurement:
        """What came out of all batches."""
        times = defaultdict(list)
        for key, begin, end in self._marks:
            times[key].append(1000 * (end - begin) if self._is_host else begin.elapsed_time(end))
        return Measurement({key: median(values) for key, values in times.items()}, self.batches)

    def _mark(self) -> Any:
        if self._is_host:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event


def measured_costs(program: Program, measurements: Sequence[Measurement]) -> Costs:
    """Costs from all ranks' measurements of batches, in milliseconds; of two copies of a stage the mean counts.

    Messages cannot be timed without a common clock. Their latency is the one with which the simulated batch takes as
    long as the shortest measured one.
    """
    def of(kind: str) -> tuple[float, ...]:
        return tuple(fmean(measurement.times[kind, stage] for measurement in measurements
                           if (kind, stage) in measurement.times)
                     for stage in range(program.placement.stages))

    costs = costs_of_stages(program, of("F"), of("I"), of("W"))
    return fit_latency(program, costs, shortest_batch([measurement.batches for measurement in measurements]))


def shortest_batch(per_rank: Sequence[Sequence[float]]) -> float:
    """Of each rank's times of the same batches, that of the batch whose slowest rank was the fastest."""
    return min(map(max, zip(*per_rank, strict=True)))
