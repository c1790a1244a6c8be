"""The simulator: gives a program's actions times.

Sends and receives take no time of their rank (they are asynchronous). A message waits until its channel is free,
occupies it for ``transfer`` and arrives ``latency`` later.
"""

from collections import Counter, deque
from dataclasses import dataclass
from functools import cached_property

from .actions import SEND_B, SEND_F, Action
from .communication import counterpart, incoming, peer_of
from .costs import Costs
from .program import Program


@dataclass(frozen=True)
class Span:
    """A compute action with its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated or measured batch: the spans of each rank in order, and the messages of each channel."""

    spans: tuple[tuple[Span, ...], ...]
    messages: dict[tuple[int, int], int]
    optimizer: float = 0.0

    @cached_property
    def makespan(self) -> float:
        """From the first action's start to the end of the last rank's optimizer step."""
        return max((row[-1].end for row in self.spans if row), default=0.0) + self.optimizer

    @cached_property
    def busy(self) -> float:
        """The work of all ranks together."""
        return sum(span.end - span.start for row in self.spans for span in row) + len(self.spans) * self.optimizer

    @cached_property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do nothing."""
        return 1 - self.busy / (len(self.spans) * self.makespan) if self.makespan else 0.0


class DeadlockError(RuntimeError):
    """The program stands still; :func:`~deepspeed_prt.program.verifier.verify` says why."""


def simulate(program: Program, costs: Costs) -> Timeline:
    """Time a program.

    Raises:
        DeadlockError: some rank waits for a message that never comes.
    """
    placement = program.placement
    rows = program.rows
    position = [0] * len(rows)
    clock = [0.0] * len(rows)
    spans: list[list[Span]] = [[] for _ in rows]
    arrival: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = {}
    waiting: dict[Action, int] = {}
    messages: Counter[tuple[int, int]] = Counter()
    runnable = deque(range(len(rows)))
    while runnable:
        rank = runnable.popleft()
        row = rows[rank]
        now = clock[rank]
        index = position[rank]
        while index < len(row):
            action = row[index]
            kind = action.kind
            if kind in (SEND_F, SEND_B):
                arrived = counterpart(action)
                channel = rank, peer_of(action, placement)
                free[channel] = max(now, free.get(channel, 0.0)) + costs.transfer
                arrival[arrived] = free[channel] + costs.latency
                messages[channel] += 1
                if arrived in waiting:
                    runnable.append(waiting.pop(arrived))
            elif action.is_compute:
                recv = incoming(action, placement)
                start = now
                if recv is not None:
                    if recv not in arrival:
                        waiting[recv] = rank
                        break
                    start = max(now, arrival[recv])
                now = start + costs.of(action)
                spans[rank].append(Span(action, start, now))
            index += 1
        position[rank] = index
        clock[rank] = now
    if waiting:
        stuck = ", ".join(f"rank {rank} for {recv}" for recv, rank in waiting.items())
        raise DeadlockError(f"ranks wait for messages that are never sent: {stuck}")
    return Timeline(tuple(map(tuple, spans)), dict(messages), costs.optimizer)
