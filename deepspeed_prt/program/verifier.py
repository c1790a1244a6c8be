"""The verifier: runs a program symbolically and says what is wrong with it, at which action.

It proves that every input is present when it is used, that every message is sent once and received once, in the same
order on both sides, that the ranks cannot wait for each other in a circle, that no receive is posted before what its
message needs of the same rank, that no slot is used twice at once and that no rank holds more activations than the cap.
"""

from collections import Counter, deque

from .actions import (
    BACKWARD,
    FORWARD,
    GIVES_INPUT_GRAD,
    GIVES_WEIGHT_GRAD,
    INPUT_GRAD,
    RECV_B,
    SEND_B,
    SEND_F,
    WEIGHT_GRAD,
    Action,
    Kind,
    Row,
)
from .communication import counterpart, incoming, outgoing, peer_of
from .errors import ProgramError
from .placement import Placement
from .program import Program
from .slots import lifetimes


def verify(program: Program) -> None:
    """Check a program.

    Raises:
        ProgramError: the first fault found.
    """
    placement = program.placement
    for parts, what in ((program.rows, "rows"), (program.slots, "slot maps")):
        if len(parts) != placement.ranks:
            raise ProgramError(f"a program for {placement.ranks} ranks has {len(parts)} {what}; "
                               "write one row per rank")
    for rank, row in enumerate(program.rows):
        _check_actions(row, rank, program)
    for rank, row in enumerate(program.rows):
        _check_complete(row, rank, program)
    for rank, row in enumerate(program.rows):
        _check_local_order(row, rank, placement)
    _check_channels(program)
    _check_no_cycle(program)
    for rank, row in enumerate(program.rows):
        _check_slots(row, rank, program)
        peak = program.peak_in_flight(rank)
        if program.has_backward and peak > program.max_in_flight:
            raise ProgramError(f"rank {rank} holds {peak:g} micro-batches in flight, more than max_in_flight "
                               f"{program.max_in_flight:g}; raise max_in_flight or choose another schedule")


def _check_actions(row: Row, rank: int, program: Program) -> None:
    """Every action is in range, on its rank and there once; every message crosses ranks; no compute is missing."""
    placement = program.placement
    for action in row:
        if not 0 <= action.stage < placement.stages:
            raise ProgramError(f"rank {rank}: {action} is out of range; stages are 0..{placement.stages - 1}")
        if not 0 <= action.micro_batch < program.micro_batches:
            raise ProgramError(f"rank {rank}: {action} is out of range; "
                               f"micro-batches are 0..{program.micro_batches - 1}")
        owner = placement.routes[action.micro_batch % placement.pipes][action.stage]
        if owner != rank:
            raise ProgramError(f"rank {rank}: {action} belongs to rank {owner} in placement '{placement.name}'")
        if not action.is_compute and not _crosses_ranks(action, placement):
            raise ProgramError(f"rank {rank}: {action} is unmatched; that boundary does not join two ranks")
    present = set(row)
    if len(present) < len(row):
        action = next(action for action, count in Counter(row).items() if count > 1)
        raise ProgramError(f"rank {rank}: duplicate {action}")
    for action in row:
        if action.kind in (INPUT_GRAD, WEIGHT_GRAD) and action._replace(kind=BACKWARD) in present:
            raise ProgramError(f"rank {rank}: duplicate {action}, {action._replace(kind=BACKWARD)} does the same")
    visits = placement.reuse * program.micro_batches
    for wanted, without in _needed_kinds(program, row):
        if sum(action.kind in wanted for action in row) < visits:
            missing = next(Action(stage, without, micro_batch)
                           for stage, micro_batch in sorted(placement.visits_of(rank, program.micro_batches))
                           if not any(Action(stage, kind, micro_batch) in present for kind in wanted))
            raise ProgramError(f"rank {rank}: {missing} is missing")


def _check_complete(row: Row, rank: int, program: Program) -> None:
    """Every compute action has its messages."""
    present = set(row)
    for action in row:
        for message in (outgoing(action, program.placement), incoming(action, program.placement)):
            if message is not None and message not in present:
                raise ProgramError(f"rank {rank}: {message} is missing")


def _needed_kinds(program: Program, row: Row) -> list[tuple[frozenset[Kind], Kind]]:
    """What every visit needs one of, and what to call it where it is missing."""
    needed: list[tuple[frozenset[Kind], Kind]] = [(frozenset({FORWARD}), FORWARD)]
    if program.has_backward:
        is_split = any(action.kind in (INPUT_GRAD, WEIGHT_GRAD) for action in row)
        needed += [(GIVES_INPUT_GRAD, INPUT_GRAD if is_split else BACKWARD),
                   (GIVES_WEIGHT_GRAD, WEIGHT_GRAD if is_split else BACKWARD)]
    return needed


def _crosses_ranks(action: Action, placement: Placement) -> bool:
    return placement.is_remote(action.stage + 1 if action.kind in (SEND_F, RECV_B) else action.stage)


def _check_local_order(row: Row, rank: int, placement: Placement) -> None:
    """What an action needs of its own rank comes before it; weight gradients of a stage come in micro-batch order."""
    present = set(row)
    done: set[Action] = set()
    last_of: dict[tuple[int, int], Action] = {}
    for action in row:
        for needs in _local_needs(action, placement):
            if done.isdisjoint(needs):
                later = next((need for need in needs if need in present), needs[0])
                raise ProgramError(f"rank {rank}: wrong order, {action} comes before {later}")
        if action.kind in GIVES_WEIGHT_GRAD:
            key = action.stage, placement.pipe_of(action.micro_batch)
            last = last_of.get(key, action)
            if action.micro_batch < last.micro_batch:
                raise ProgramError(f"rank {rank}: wrong order, {action} comes after {last}; "
                                   "gradients are added in micro-batch order")
            last_of[key] = action
        done.add(action)


def _local_needs(action: Action, placement: Placement) -> list[tuple[Action, ...]]:
    """What has to be done before; of each tuple, one will do."""
    stage, kind, micro_batch = action
    below: list[tuple[Action, ...]]
    if kind == FORWARD:
        recv = incoming(action, placement)
        below = [(Action(stage - 1, FORWARD, micro_batch), )] if stage > 0 else []
        return [(recv, )] if recv is not None else below
    if kind in GIVES_INPUT_GRAD:
        recv = incoming(action, placement)
        above = [_input_grads(stage + 1, micro_batch)] if stage + 1 < placement.stages else []
        return [(Action(stage, FORWARD, micro_batch), ), *([(recv, )] if recv is not None else above)]
    if kind == WEIGHT_GRAD:
        return [(Action(stage, INPUT_GRAD, micro_batch), )]
    if kind in (SEND_F, RECV_B):
        return [(Action(stage, FORWARD, micro_batch), )]
    if kind == SEND_B:
        return [_input_grads(stage, micro_batch)]
    return []


def _input_grads(stage: int, micro_batch: int) -> tuple[Action, ...]:
    return Action(stage, BACKWARD, micro_batch), Action(stage, INPUT_GRAD, micro_batch)


def _check_channels(program: Program) -> None:
    """Both ends of a channel list the same messages in the same order."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(program.rows):
        for action in row:
            if action.kind in (SEND_F, SEND_B):
                sent.setdefault((rank, peer_of(action, program.placement)), []).append(action)
            elif not action.is_compute:
                received.setdefault((peer_of(action, program.placement), rank), []).append(action)
    for channel in sorted(sent.keys() | received.keys()):
        sends, receives = sent.get(channel, []), received.get(channel, [])
        where = f"channel from rank {channel[0]} to rank {channel[1]}"
        matched = {counterpart(send) for send in sends}
        for lonely in sorted(matched ^ set(receives)):
            action = lonely if lonely in receives else counterpart(lonely)
            raise ProgramError(f"{where}: {action} is unmatched, there is no {counterpart(action)}")
        for index, (send, recv) in enumerate(zip(sends, receives, strict=True)):
            if counterpart(send) != recv:
                raise ProgramError(f"{where}: message {index} is sent by {send} but received by {recv}; "
                                   "both sides need one order")


def _check_no_cycle(program: Program) -> None:
    """Run every rank until it waits; ranks that wait for each other for ever are a cycle, which is printed.

    With each message travels, as a vector clock, how many actions of every rank it comes after.
    """
    position = [0] * len(program.rows)
    after = [[0] * len(program.rows) for _ in program.rows]
    posted: dict[Action, int] = {}
    sent: dict[Action, list[int]] = {}
    waiting: dict[Action, int] = {}
    runnable = deque(range(len(program.rows)))
    while runnable:
        rank = runnable.popleft()
        row = program.rows[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            if action.kind in (SEND_F, SEND_B):
                arrived = counterpart(action)
                sent[arrived] = after[rank].copy()
                if arrived in waiting:
                    runnable.append(waiting.pop(arrived))
            elif action.is_compute:
                recv = incoming(action, program.placement)
                if recv is not None:
                    if recv not in sent:
                        waiting[recv] = rank
                        break
                    behind = sent.pop(recv)
                    if behind[rank] > posted[recv]:
                        raise ProgramError(f"rank {rank}: wrong order, {recv} comes before {row[behind[rank] - 1]}, "
                                           "without which its message is never sent")
                    after[rank] = list(map(max, after[rank], behind))
                after[rank][rank] = position[rank] + 1
            else:
                posted[action] = position[rank]
            position[rank] += 1
    if waiting:
        raise ProgramError("the ranks wait for each other in a cycle: " + _describe_cycle(program, position))


def _describe_cycle(program: Program, position: list[int]) -> str:
    """Follow who waits for whom from any waiting rank until one comes up again."""
    rank = next(rank for rank, row in enumerate(program.rows) if position[rank] < len(row))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = peer_of(_awaited(program, rank, position), program.placement)
    lines = []
    for member in path[path.index(rank):]:
        stuck = program.rows[member][position[member]]
        recv = _awaited(program, member, position)
        source = peer_of(recv, program.placement)
        blocker = program.rows[source][position[source]]
        lines.append(f"rank {member} at {stuck} waits for {counterpart(recv)}, which rank {source} does after "
                     f"{blocker}")
    return "; ".join(lines)


def _awaited(program: Program, rank: int, position: list[int]) -> Action:
    """The RECV that a waiting rank waits for."""
    recv = incoming(program.rows[rank][position[rank]], program.placement)
    assert recv is not None
    return recv


def _check_slots(row: Row, rank: int, program: Program) -> None:
    """No two (stage, micro-batch) pairs use one slot at the same time."""
    slots = program.slots[rank]
    spans = lifetimes(row, program.placement)
    last_use: dict[int, tuple[int, tuple[int, int]]] = {}
    for visit, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if visit not in slots:
            raise ProgramError(f"rank {rank}: stage {visit[0]}, micro-batch {visit[1]} has no slot")
        slot = slots[visit]
        if slot < 0:
            raise ProgramError(f"rank {rank}: slot {slot} of stage {visit[0]}, micro-batch {visit[1]} is negative")
        if slot in last_use and last_use[slot][0] >= first:
            other = last_use[slot][1]
            raise ProgramError(f"rank {rank}: slot {slot} clash at {row[first]}: stage {other[0]}, micro-batch "
                               f"{other[1]} holds it until {row[last_use[slot][0]]}")
        last_use[slot] = (last, visit)


