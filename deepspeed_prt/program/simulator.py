"""The simulator: gives a program's actions times.

Sends and receives take no time of their rank (they are asynchronous). A message waits until its channel is free,
occupies it for ``transfer`` and arrives ``latency`` later.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .actions import SEND_B, SEND_F, Action, Row
from .communication import counterpart, incoming, peer_of
from .costs import Costs
from .placement import Placement
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


_UNKNOWN = -1.0
"""The arrival of a message that nobody has sent yet."""


class Simulation:
    """Rows made ready to be timed, and timed again after actions of a rank have changed places.

    Compute actions have numbers over all ranks, from 0 on. A message is sent when the action before it in its row ends;
    receives take no part.

    Attributes:
        rows: the numbers of each rank's actions, in its order; may be changed.
        actions: by number.
        rank_of: by number.
        durations: by number.
        sender_of: of an action that needs a message, the one after which it is sent.
    """

    def __init__(self, rows: Sequence[Row], placement: Placement, costs: Costs) -> None:
        self.rows: list[list[int]] = []
        self.actions: list[Action] = []
        self.rank_of: list[int] = []
        sent: dict[Action, tuple[int, int]] = {}
        channels: dict[tuple[int, int], int] = {}
        messages: Counter[int] = Counter()
        for rank, row in enumerate(rows):
            first = len(self.actions)
            for action in row:
                if action.is_compute:
                    self.actions.append(action)
                elif action.kind in (SEND_F, SEND_B) and len(self.actions) > first:
                    channel = channels.setdefault((rank, peer_of(action, placement)), len(channels))
                    messages[channel] += 1
                    sent[counterpart(action)] = len(self.actions) - 1, channel
            self.rows.append(list(range(first, len(self.actions))))
            self.rank_of += [rank] * (len(self.actions) - first)
        self.durations = [costs.of(action) for action in self.actions]
        self.messages = {channel: messages[index] for channel, index in channels.items()}
        self.sender_of: dict[int, int] = {}
        self._placement = placement
        self._costs = costs
        # What leaves after each action: for which action it is, and on which channel.
        self._sends: list[list[tuple[int, int]]] = [[] for _ in self.actions]
        self._arrivals: list[float] = []
        for number, action in enumerate(self.actions):
            needed = incoming(action, placement)
            self._arrivals.append(0.0 if needed is None else _UNKNOWN)
            if needed in sent:
                self.sender_of[number], channel = sent[needed]
                self._sends[self.sender_of[number]].append((number, channel))

    def starts(self) -> list[float]:
        """When each action starts, by number.

        Raises:
            DeadlockError: some rank waits for a message that never comes.
        """
        rows, durations, sends, latency, transfer = (self.rows, self.durations, self._sends, self._costs.latency,
                                                     self._costs.transfer)
        starts = [0.0] * len(self.actions)
        arrivals = self._arrivals.copy()
        free = [0.0] * len(self.messages)
        clock = [0.0] * len(rows)
        position = [0] * len(rows)
        waiting: set[int] = set()
        runnable = list(range(len(rows)))
        while runnable:
            rank = runnable.pop()
            row, now, index = rows[rank], clock[rank], position[rank]
            while index < len(row):
                number = row[index]
                arrival = arrivals[number]
                if arrival == _UNKNOWN:
                    waiting.add(number)
                    break
                starts[number] = now = max(now, arrival)
                now += durations[number]
                for receiver, channel in sends[number]:
                    free[channel] = max(now, free[channel]) + transfer
                    arrivals[receiver] = free[channel] + latency
                    if receiver in waiting:
                        waiting.remove(receiver)
                        runnable.append(self.rank_of[receiver])
                index += 1
            position[rank], clock[rank] = index, now
        if waiting:
            stuck = ", ".join(f"rank {self.rank_of[number]} for {incoming(self.actions[number], self._placement)}"
                              for number in sorted(waiting))
            raise DeadlockError(f"ranks wait for messages that are never sent: {stuck}")
        return starts

    def makespan(self, starts: Sequence[float]) -> float:
        """The time from the first action's start to the end of the last rank's optimizer step."""
        return max(starts[row[-1]] + self.durations[row[-1]] for row in self.rows if row) + self._costs.optimizer


def simulate(program: Program, costs: Costs) -> Timeline:
    """Time a program.

    Raises:
        DeadlockError: some rank waits for a message that never comes.
    """
    simulation = Simulation(program.rows, program.placement, costs)
    starts = simulation.starts()
    spans = tuple(tuple(Span(simulation.actions[number], starts[number], starts[number] + simulation.durations[number])
                        for number in row) for row in simulation.rows)
    return Timeline(spans, simulation.messages, costs.optimizer)
