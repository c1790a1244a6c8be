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


def add_sends(rows: Sequence[Row], placement: Placement) -> tuple[Row, ...]:
    """Rows of compute actions with their sends put in only, which is what takes time.

    Raises:
        ProgramError: as :func:`add_communication`.
    """
    return tuple(tuple(some for index, action in enumerate(row)
                       for some in ((action, sends[index]) if index in sends else (action, )))
                 for row, sends in zip(rows, _sends(rows, placement), strict=True))


def add_communication(rows: Sequence[Row], placement: Placement) -> tuple[Row, ...]:
    """Rows of compute actions with their sends and receives put in.

    A send follows the action that produces it. A receive is posted ``LOOKAHEAD`` compute actions before its use, moved
    earlier where the channel's order asks for it, and never before an action of its own rank that its message depends
    on: so whoever waits for all that a device has begun, as memory allocators and profilers do, waits for no action
    that the rank has yet to begin. (Two ranks that wait so at once can still wait for each other.)

    Raises:
        ProgramError: there is not one row per rank, or an action of a stage that does not exist.
    """
    sends = _sends(rows, placement)
    channels: dict[tuple[int, int], list[Action]] = {}
    for source, of_rank in enumerate(sends):
        for send in of_rank.values():
            channels.setdefault((source, peer_of(send, placement)), []).append(counterpart(send))
    needed = [{index: recv for index, action in enumerate(row) if (recv := incoming(action, placement)) is not None}
              for row in rows]

    posts: list[dict[int, list[tuple[int, Action]]]] = [{} for _ in rows]
    uses_of = [{recv: index for index, recv in of_rank.items()} for of_rank in needed]
    needs_of = _needs_of_messages(rows, sends, needed)
    for (_, target), receives in channels.items():
        uses = [uses_of[target].get(recv, -1) for recv in receives]
        # Later messages of the channel pull earlier ones forward ...
        latest = [max(use - LOOKAHEAD, 0) for use in uses]
        for index in range(len(latest) - 2, -1, -1):
            latest[index] = min(latest[index], latest[index + 1])
        # ... but not before what the message needs of its receiver.
        earliest = 0
        for recv, use, post in zip(receives, uses, latest, strict=True):
            earliest = max(earliest, needs_of[recv] if recv in needs_of else _own_forward(recv, rows[target]))
            posts[target].setdefault(max(post, earliest), []).append((use, recv))

    result = []
    for row, posted, sent in zip(rows, posts, sends, strict=True):
        complete: list[Action] = []
        for index, action in enumerate(row):
            if index in posted:
                receives_here = posted[index]
                complete += (recv for _, recv in
                             (receives_here if len(receives_here) == 1 else _by_use(receives_here, placement)))
            complete.append(action)
            if index in sent:
                complete.append(sent[index])
        result.append(tuple(complete))
    return tuple(result)


def _sends(rows: Sequence[Row], placement: Placement) -> list[dict[int, Action]]:
    """By rank, the SEND that follows the action of an index."""
    if len(rows) != placement.ranks:
        raise ProgramError(f"a program for {placement.ranks} ranks has {len(rows)} rows; write one row per rank")
    for rank, row in enumerate(rows):
        for action in row:
            if not 0 <= action.stage < placement.stages:
                raise ProgramError(f"rank {rank}: {action} is out of range; stages are 0..{placement.stages - 1}")
    return [{index: send for index, action in enumerate(row) if (send := outgoing(action, placement)) is not None}
            for row in rows]


def _needs_of_messages(rows: Sequence[Row], sends: Sequence[dict[int, Action]],
                       needed: Sequence[dict[int, Action]]) -> dict[Action, int]:
    """How many actions of its receiver have to be over before a message can be sent, by its RECV.

    Runs every rank until it waits; messages that are never sent are left out. With each travels, as a vector clock, how
    many actions of every rank it comes after.

    Args:
        rows: compute actions.
        sends: see :func:`_sends`.
        needed: by rank, the RECV that the action of an index waits for.
    """
    ranks = range(len(rows))
    behind = [[0] * len(rows) for _ in ranks]
    travelling: dict[Action, list[int]] = {}
    waiting: dict[Action, int] = {}
    needs: dict[Action, int] = {}
    position = [0 for _ in ranks]
    runnable = list(ranks)
    while runnable:
        rank = runnable.pop()
        for index in range(position[rank], len(rows[rank])):
            recv = needed[rank].get(index)
            if recv is not None:
                if recv not in travelling:
                    waiting[recv], position[rank] = rank, index
                    break
                theirs = travelling.pop(recv)
                needs[recv] = theirs[rank]
                behind[rank] = list(map(max, behind[rank], theirs))
            behind[rank][rank] = index + 1
            if index in sends[rank]:
                sent = counterpart(sends[rank][index])
                travelling[sent] = behind[rank].copy()
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
    return needs


def _own_forward(recv: Action, row: Row) -> int:
    """How many actions there are up to the forward that a gradient belongs to, where the ranks do not get to it."""
    forward = Action(recv.stage, FORWARD, recv.micro_batch)
    return row.index(forward) + 1 if recv.kind == RECV_B and forward in row else 0


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
