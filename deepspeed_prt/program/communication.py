"""The communication pass: sends and receives for every boundary that joins two ranks.

A channel is all messages from one rank to another, in one order. It is the order in which the sender produces them, so
a send never waits for anything; the receiver posts its receives in that same order, a little ahead of their use.
"""

from collections.abc import Sequence

from .actions import FORWARD, GIVES_INPUT_GRAD, RECV_B, RECV_F, SEND_B, SEND_F, Action, Kind, Row
from .errors import ProgramError
from .placement import Placement

LOOKAHEAD = 1
"""How many compute actions before its use a receive is posted: one hides the transfer behind the rank's work."""


_PEERS: dict[str, tuple[int, Kind]] = {
    SEND_F: (1, RECV_F),
    RECV_F: (-1, SEND_F),
    SEND_B: (-1, RECV_B),
    RECV_B: (1, SEND_B),
}


def counterpart(action: Action) -> Action:
    """The RECV that a SEND is for, or the SEND that a RECV waits for."""
    step, kind = _PEERS[action.kind]
    return Action(action.stage + step, kind, action.micro_batch)


def peer_of(action: Action, placement: Placement) -> int:
    """The rank at the other end of a SEND or RECV."""
    return placement.routes[action.micro_batch % placement.pipes][action.stage + _PEERS[action.kind][0]]


def outgoing(action: Action, placement: Placement) -> Action | None:
    """The SEND that follows a compute action, if its result goes to another rank."""
    stage, kind, micro_batch = action
    if kind == FORWARD and placement.is_remote(stage + 1):
        return Action(stage, SEND_F, micro_batch)
    if kind in GIVES_INPUT_GRAD and placement.is_remote(stage):
        return Action(stage, SEND_B, micro_batch)
    return None


def incoming(action: Action, placement: Placement) -> Action | None:
    """The RECV that a compute action has to wait for, if what it needs comes from another rank."""
    stage, kind, micro_batch = action
    if kind == FORWARD and placement.is_remote(stage):
        return Action(stage, RECV_F, micro_batch)
    if kind in GIVES_INPUT_GRAD and placement.is_remote(stage + 1):
        return Action(stage, RECV_B, micro_batch)
    return None


def add_communication(rows: Sequence[Row], placement: Placement) -> tuple[Row, ...]:
    """Rows of compute actions with their sends and receives put in.

    A send follows the action that produces it. A receive is posted ``LOOKAHEAD`` compute actions before its use, moved
    earlier where the channel's order asks for it, and never before the rank has run the forward whose gradient comes.

    Raises:
        ProgramError: there is not one row per rank, or an action of a stage that does not exist.
    """
    if len(rows) != placement.ranks:
        raise ProgramError(f"a program for {placement.ranks} ranks has {len(rows)} rows; write one row per rank")
    for rank, row in enumerate(rows):
        for action in row:
            if not 0 <= action.stage < placement.stages:
                raise ProgramError(f"rank {rank}: {action} is out of range; stages are 0..{placement.stages - 1}")
    channels: dict[tuple[int, int], list[Action]] = {}
    for source, row in enumerate(rows):
        for action in row:
            send = outgoing(action, placement)
            if send is not None:
                channels.setdefault((source, peer_of(send, placement)), []).append(counterpart(send))

    posts: list[dict[int, list[tuple[int, Action]]]] = [{} for _ in rows]
    positions = [{action: index for index, action in enumerate(row)} for row in rows]
    uses_of = [{recv: index for index, action in enumerate(row) if (recv := incoming(action, placement)) is not None}
               for row in rows]
    for (_, target), receives in channels.items():
        position = positions[target]
        uses = [uses_of[target].get(recv, -1) for recv in receives]
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
                receives_here = posted[index]
                complete += (recv for _, recv in
                             (receives_here if len(receives_here) == 1 else _by_use(receives_here, placement)))
            complete.append(action)
            send = outgoing(action, placement)
            if send is not None:
                complete.append(send)
        result.append(tuple(complete))
    return tuple(result)


def _by_use(receives: list[tuple[int, Action]], placement: Placement) -> list[tuple[int, Action]]:
    """Receives posted together, the one used first first, as far as each channel's order allows."""
    queues: dict[int, list[tuple[int, Action]]] = {}
    for item in receives:
        queues.setdefault(peer_of(item[1], placement), []).append(item)
    merged = []
    while queues:
        source = min(queues, key=lambda key: queues[key][0][0])
        merged.append(queues[source].pop(0))
        if not queues[source]:
            del queues[source]
    return merged
