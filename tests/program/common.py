"""Tables of actions as text, programs to test with, and an executor that shares no code with the verifier."""

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import strategies as st

from deepspeed_prt.program.actions import Action, Row, format_row, parse_row
from deepspeed_prt.program.orders import ORDERS
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import Program, build


def rows_of(table: str) -> tuple[Row, ...]:
    """Read a table: one line per rank, white space between the actions."""
    return tuple(parse_row(line) for line in table.strip().splitlines())


def table_of(rows: Iterable[Row]) -> list[str]:
    """Write a table, one string per rank, so that a failing comparison shows the rank that differs."""
    return [format_row(row) for row in rows]


def lines(table: str) -> list[str]:
    """The lines of an expected table, with the padding that lays it out taken away."""
    return [" ".join(line.split()) for line in table.strip().splitlines()]


@st.composite
def programs(draw: st.DrawFn, schedules: Iterable[str] = tuple(ORDERS), names: Iterable[str] = ("loop", "wave"),
             ranks: int = 6, reuse: int = 4, micro_batches: int = 20) -> Program:
    """Programs of every order and size, with smaller caps where the order keeps one."""
    schedule = draw(st.sampled_from(sorted(schedules)))
    p = draw(st.integers(1, ranks))
    placement = Placement(draw(st.sampled_from(sorted(names))), p,
                          1 if schedule == "1f1b" else draw(st.integers(1, reuse)))
    keeps_a_cap = schedule in ("1f1b", "interleaved_1f1b")
    cap = draw(st.sampled_from([None, 1, 1.5, 2, p])) if keeps_a_cap else None
    return build(schedule, placement, draw(st.integers(1, micro_batches)), cap)


class ReplayError(Exception):
    """The program could not be executed."""


def replay(program: Program) -> None:
    """Execute a program with first-in first-out channels and named values in the place of tensors.

    An executor in its own right: a receive takes the next place in its channel and is filled by whatever the sender
    put there, and every action looks up the value that it needs.

    Raises:
        ReplayError: an input is missing, a message is another one than the receiver expects, a message or an action
            is left over, gradients come out of order, or all ranks wait.
    """
    p, last = program.placement.ranks, program.placement.stages - 1
    route = program.placement.route
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
    taken: list[dict[Action, int]] = [{} for _ in range(p)]
    values: list[set[tuple[str, int, int]]] = [set() for _ in range(p)]
    added: dict[int, list[int]] = defaultdict(list)
    position = [0] * p

    def arrived(rank: int, recv: Action) -> bool:
        """Whether the message of a posted receive is there; it has to be the one that was expected."""
        if recv not in taken[rank]:
            raise ReplayError(f"{recv} was not posted")
        sender = recv.stage - 1 if recv.kind == "RECV_F" else recv.stage + 1
        channel, place = sent[route[sender], rank], taken[rank][recv]
        if place >= len(channel):
            return False
        what = ("output" if recv.kind == "RECV_F" else "gradient", sender, recv.micro_batch)
        if channel[place] != what:
            raise ReplayError(f"{recv} got {channel[place]}")
        return True

    def need(rank: int, what: str, stage: int, micro_batch: int) -> None:
        if (what, stage, micro_batch) not in values[rank]:
            raise ReplayError(f"rank {rank} has no {what} of stage {stage}, micro-batch {micro_batch}")

    def run(rank: int, action: Action) -> bool:
        """Run one action; False: it has to wait."""
        stage, kind, micro_batch = action
        if route[stage] != rank:
            raise ReplayError(f"{action} on rank {rank}")
        if kind == "F":
            if stage > 0 and route[stage - 1] != rank:
                if not arrived(rank, Action(stage, "RECV_F", micro_batch)):
                    return False
            elif stage > 0:
                need(rank, "output", stage - 1, micro_batch)
            result = ("output", stage, micro_batch)
        elif kind == "B":
            need(rank, "output", stage, micro_batch)
            if stage < last and route[stage + 1] != rank:
                if not arrived(rank, Action(stage, "RECV_B", micro_batch)):
                    return False
            elif stage < last:
                need(rank, "gradient", stage + 1, micro_batch)
            added[stage].append(micro_batch)
            result = ("gradient", stage, micro_batch)
        elif kind in ("SEND_F", "SEND_B"):
            what, target = ("output", stage + 1) if kind == "SEND_F" else ("gradient", stage - 1)
            need(rank, what, stage, micro_batch)
            sent[rank, route[target]].append((what, stage, micro_batch))
            return True
        else:
            source = route[stage - 1 if kind == "RECV_F" else stage + 1]
            if kind == "RECV_B":
                need(rank, "output", stage, micro_batch)
            taken[rank][action] = len(posted[source, rank])
            posted[source, rank].append(action)
            return True
        if result in values[rank]:
            raise ReplayError(f"{action} twice")
        values[rank].add(result)
        return True

    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(program.rows):
            while position[rank] < len(row) and run(rank, row[position[rank]]):
                position[rank] += 1
                progress = True
    if position != [len(row) for row in program.rows]:
        raise ReplayError(f"every rank waits: {position}")
    for channel in sent.keys() | posted.keys():
        if len(sent[channel]) != len(posted[channel]):
            raise ReplayError(f"{channel}: {len(sent[channel])} sent, {len(posted[channel])} received")
    whats = ("output", "gradient") if program.has_backward else ("output", )
    for stage in range(last + 1):
        for micro_batch in range(program.micro_batches):
            for what in whats:
                need(route[stage], what, stage, micro_batch)
        if added[stage] != sorted(added[stage]):
            raise ReplayError(f"stage {stage} adds gradients in the order {added[stage]}")
