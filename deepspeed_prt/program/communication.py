"""The communication pass: sends and receives for every boundary that joins two ranks.

A channel is all messages from one rank to another, in one order. It is the order in which the sender produces them, so
a send never waits for anything; the receiver posts its receives in that same order, a little ahead of their use.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .actions import BACKWARD, FORWARD, RECV_B, RECV_F, SEND_B, SEND_F, Action, Kind, Row
from .placement import Placement

LOOKAHEAD = 1
"""How many compute actions before its use a receive is posted: one hides the transfer behind the rank's work."""


class Message(NamedTuple):
    """What travels when one stage hands a micro-batch to the next (``F``) or a gradient to the one before (``B``)."""

    send: Action
    recv: Action
    source: int
    target: int


def message_of(action: Action, placement: Placement) -> Message:
    """The message that a SEND or RECV action is one end of."""
    stage, kind, micro_batch = action
    forward = kind in (SEND_F, RECV_F)
    step = 1 if forward else -1
    sender = stage if kind in (SEND_F, SEND_B) else stage - step
    receiver = sender + step
    send_kind, recv_kind = (SEND_F, RECV_F) if forward else (SEND_B, RECV_B)
    return Message(Action(sender, send_kind, micro_batch), Action(receiver, recv_kind, micro_batch),
                   placement.rank_of(sender), placement.rank_of(receiver))


def outgoing(action: Action, placement: Placement) -> Message | None:
    """The message that a compute action has to send when it is done, if its result goes to another rank."""
    stage, kind, micro_batch = action
    if kind == FORWARD and placement.is_remote(stage + 1):
        return message_of(Action(stage, SEND_F, micro_batch), placement)
    if kind == BACKWARD and placement.is_remote(stage):
        return message_of(Action(stage, SEND_B, micro_batch), placement)
    return None


def incoming(action: Action, placement: Placement) -> Action | None:
    """The RECV that a compute action has to wait for, if what it needs comes from another rank."""
    stage, kind, micro_batch = action
    if kind == FORWARD and placement.is_remote(stage):
        return Action(stage, RECV_F, micro_batch)
    if kind == BACKWARD and placement.is_remote(stage + 1):
        return Action(stage, RECV_B, micro_batch)
    return None


def consumer_of(recv: Action) -> Action:
    """The compute action that uses what ``recv`` brings."""
    kind: Kind = FORWARD if recv.kind == RECV_F else BACKWARD
    return Action(recv.stage, kind, recv.micro_batch)


def add_communication(rows: Sequence[Row], placement: Placement) -> tuple[Row, ...]:
    """Rows of compute actions with their sends and receives put in.

    A send follows the action that produces it. A receive is posted ``LOOKAHEAD`` compute actions before its use, moved
    earlier where the channel's order asks for it, and never before the rank has run the forward whose gradient comes.
    """
    channels: dict[tuple[int, int], list[Action]] = {}
    for row in rows:
        for action in row:
            message = outgoing(action, placement)
            if message is not None:
                channels.setdefault((message.source, message.target), []).append(message.recv)

    posts: list[dict[int, list[tuple[int, Action]]]] = [{} for _ in rows]
    positions = [{action: index for index, action in enumerate(row)} for row in rows]
    for (_, target), receives in channels.items():
        position = positions[target]
        uses = [position.get(consumer_of(recv), -1) for recv in receives]
        # Later messages of the channel pull earlier ones forward ...
        latest = [max(use - LOOKAHEAD, 0) for use in uses]
        for index in range(len(latest) - 2, -1, -1):
            latest[index] = min(latest[index], latest[index + 1])
        # ... but the shape of a gradient is known only after the forward.
        earliest = 0
        for recv, use, post in zip(receives, uses, latest, strict=True):
            if recv.kind == RECV_B:
                earliest = max(earliest, position.get(Action(recv.stage, FORWARD, recv.micro_batch), -1) + 1)
            posts[target].setdefault(max(post, earliest), []).append((use, recv))

    result = []
    for row, posted in zip(rows, posts, strict=True):
        complete: list[Action] = []
        for index, action in enumerate(row):
            if index in posted:
                complete += (recv for _, recv in _by_use(posted[index], placement))
            complete.append(action)
            message = outgoing(action, placement)
            if message is not None:
                complete.append(message.send)
        result.append(tuple(complete))
    return tuple(result)


def _by_use(receives: list[tuple[int, Action]], placement: Placement) -> list[tuple[int, Action]]:
    """Receives posted together, the one used first first, as far as each channel's order allows."""
    queues: dict[int, list[tuple[int, Action]]] = {}
    for item in receives:
        queues.setdefault(message_of(item[1], placement).source, []).append(item)
    merged = []
    while queues:
        source = min(queues, key=lambda key: queues[key][0][0])
        merged.append(queues[source].pop(0))
        if not queues[source]:
            del queues[source]
    return merged
