"""Tables of actions as text, programs to test with, and an executor that shares no code with the verifier."""

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import strategies as st

from deepspeed_prt.program.actions import Action, Row, format_row, parse_row
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.orders import ORDERS
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import Program

NAMES = ("loop", "wave")
UNI, BI = DIRECTIONS = ("unidirectional", "bidirectional")
HOLD_EVERYTHING = ("breadth_first", "gpipe")
"""Orders that hold every micro-batch, whatever the cap."""
NEED_ONE_STAGE_A_RANK = ("1f1b", )
NEED_A_V = ("zbv", )


def rows_of(table: str) -> tuple[Row, ...]:
    """Read a table: one line per rank, white space between the actions."""
    return tuple(parse_row(line) for line in table.strip().splitlines())


def table_of(rows: Iterable[Row]) -> list[str]:
    """Write a table, one string per rank, so that a failing comparison shows the rank that differs."""
    return [format_row(row) for row in rows]


def lines(table: str) -> list[str]:
    """The lines of an expected table, with the padding that lays it out taken away."""
    return [" ".join(line.split()) for line in table.strip().splitlines()]


def peaks(program: Program) -> list[float]:
    """The most micro-batches that each rank holds."""
    return [program.peak_in_flight(rank) for rank in range(program.placement.ranks)]


@st.composite
def placements(draw: st.DrawFn, names: Iterable[str] = NAMES, directions: Iterable[str] = DIRECTIONS,
               ranks: int = 5, reuse: int = 4) -> Placement:
    """Placements of every shape; two pipes need two ranks."""
    direction = draw(st.sampled_from(tuple(directions)))
    return Placement(draw(st.sampled_from(tuple(names))), draw(st.integers(1 + (direction == BI), ranks)),
                     draw(st.integers(1, reuse)), direction)


@st.composite
def whole_costs(draw: st.DrawFn, placement: Placement) -> Costs:
    """Costs in whole numbers, so that sums of them are exact; equal for all stages or not."""
    def per_stage(least: int) -> tuple[int, ...]:
        share = st.integers(least, 9)
        return draw(share.map(lambda cost: (cost, ) * placement.stages)
                    | st.lists(share, min_size=placement.stages, max_size=placement.stages).map(tuple))

    return Costs(per_stage(1), per_stage(1), per_stage(0), draw(st.integers(0, 5)))


@st.composite
def programs(draw: st.DrawFn, schedules: Iterable[str] = (*ORDERS, "auto"), names: Iterable[str] = NAMES,
             directions: Iterable[str] = DIRECTIONS, ranks: int = 5, reuse: int = 4,
             micro_batches: int = 10) -> Program:
    """Programs of every order, direction and size, split or whole, with caps and costs where the order minds them."""
    schedule = draw(st.sampled_from(tuple(schedules)))
    placement = draw(placements(("wave", ) if schedule in NEED_A_V else names, directions, ranks, reuse))
    if schedule in NEED_ONE_STAGE_A_RANK:
        placement = Placement(placement.name, placement.ranks, 1, placement.direction)
    elif schedule in NEED_A_V:
        placement = Placement(placement.name, placement.ranks, 2, placement.direction)
    may_be_whole = schedule == "auto" or not ORDERS[schedule].is_split
    cap = None if schedule in HOLD_EVERYTHING else draw(st.sampled_from([None, 1, 1.5, 2, placement.ranks]))
    return build(schedule, placement, draw(st.integers(1, micro_batches)), cap,
                 draw(st.none() | whole_costs(placement)),
                 draw(st.sampled_from([None, True, False] if may_be_whole else [None, True])))


class ReplayError(Exception):
    """The program could not be executed."""


def replay(program: Program) -> None:
    """Execute a program with first-in first-out channels and named values in the place of tensors.

    An executor in its own right: a receive takes the next place in its channel and is filled by whatever the sender
    put there, and every action looks up the value that it needs. Of a (stage, micro-batch) there are at last an
    output, the gradient of the input and that of the weights; B makes both gradients, I and W one each. Then again, for
    each rank, with one that waits before every action for all that it has begun, receives included.

    Raises:
        ReplayError: an input is missing, a message is another one than the receiver expects, a message or an action
            is left over, something is computed twice, gradients come out of order, or all ranks wait.
    """
    for careful in (None, *range(program.placement.ranks)):
        _replay(program, careful)


def _replay(program: Program, careful: int | None) -> None:
    p, last = program.placement.ranks, program.placement.stages - 1
    routes = program.placement.routes
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
    taken: list[dict[Action, int]] = [{} for _ in range(p)]
    values: list[set[tuple[str, int, int]]] = [set() for _ in range(p)]
    added: dict[tuple[int, int], list[int]] = defaultdict(list)
    position = [0] * p

    def arrived(rank: int, recv: Action) -> bool:
        """Whether the message of a posted receive is there; it has to be the one that was expected."""
        if recv not in taken[rank]:
            raise ReplayError(f"{recv} was not posted")
        sender = recv.stage - 1 if recv.kind == "RECV_F" else recv.stage + 1
        channel, place = sent[routes[recv.micro_batch % len(routes)][sender], rank], taken[rank][recv]
        if place >= len(channel):
            return False
        what = ("output" if recv.kind == "RECV_F" else "gradient", sender, recv.micro_batch)
        if channel[place] != what:
            raise ReplayError(f"{recv} got {channel[place]}")
        return True

    def need(rank: int, what: str, stage: int, micro_batch: int) -> None:
        if (what, stage, micro_batch) not in values[rank]:
            raise ReplayError(f"rank {rank} has no {what} of stage {stage}, micro-batch {micro_batch}")

    def make(rank: int, what: str, stage: int, micro_batch: int) -> None:
        if (what, stage, micro_batch) in values[rank]:
            raise ReplayError(f"rank {rank} makes the {what} of stage {stage}, micro-batch {micro_batch} twice")
        values[rank].add((what, stage, micro_batch))

    def run(rank: int, action: Action) -> bool:
        """Run one action; False: it has to wait."""
        stage, kind, micro_batch = action
        pipe = micro_batch % len(routes)
        route = routes[pipe]
        if route[stage] != rank:
            raise ReplayError(f"{action} on rank {rank}")
        if rank == careful and action.is_compute and not all(arrived(rank, recv) for recv in taken[rank]):
            return False
        if kind == "F":
            if stage > 0 and route[stage - 1] != rank:
                if not arrived(rank, Action(stage, "RECV_F", micro_batch)):
                    return False
            elif stage > 0:
                need(rank, "output", stage - 1, micro_batch)
            make(rank, "output", stage, micro_batch)
        elif kind in ("B", "I"):
            need(rank, "output", stage, micro_batch)
            if stage < last and route[stage + 1] != rank:
                if not arrived(rank, Action(stage, "RECV_B", micro_batch)):
                    return False
            elif stage < last:
                need(rank, "gradient", stage + 1, micro_batch)
            make(rank, "gradient", stage, micro_batch)
        elif kind == "W":
            need(rank, "gradient", stage, micro_batch)
        else:
            other = stage + 1 if kind in ("SEND_F", "RECV_B") else stage - 1
            if not 0 <= other <= last or route[other] == rank:
                raise ReplayError(f"{action} has nobody at its other end")
            if kind in ("SEND_F", "RECV_B"):
                need(rank, "output", stage, micro_batch)
            if kind == "SEND_B":
                need(rank, "gradient", stage, micro_batch)
            if kind in ("SEND_F", "SEND_B"):
                sent[rank, route[other]].append(("output" if kind == "SEND_F" else "gradient", stage, micro_batch))
            else:
                taken[rank][action] = len(posted[route[other], rank])
                posted[route[other], rank].append(action)
        if kind in ("B", "W"):
            make(rank, "weight gradient", stage, micro_batch)
            added[stage, pipe].append(micro_batch)
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
    for stage in range(last + 1):
        for micro_batch in range(program.micro_batches):
            for what in ("output", "gradient", "weight gradient") if program.has_backward else ("output", ):
                need(routes[micro_batch % len(routes)][stage], what, stage, micro_batch)
    for (stage, pipe), order in added.items():
        if order != sorted(order):
            raise ReplayError(f"stage {stage} of pipe {pipe} adds gradients in the order {order}")
