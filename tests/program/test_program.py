"""The program: the passes together, its size at scale, and what it says about itself."""

from time import process_time

import pytest

from deepspeed_prt.program.bounds import lower_bound
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete, forward_only
from deepspeed_prt.program.simulator import simulate
from deepspeed_prt.program.verifier import verify

from .common import BI, lines, peaks, rows_of, table_of


def test_a_whole_program():
    program = build("interleaved_1f1b", Placement("loop", 2, 2), 1)
    assert table_of(program.rows) == lines("""
                 0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0
        1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0                   3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0
    """)
    assert program.slots == ({(0, 0): 0, (2, 0): 1}, {(1, 0): 0, (3, 0): 1})
    assert [program.num_slots(rank) for rank in range(2)] == [2, 2]
    assert peaks(program) == [1, 1]
    assert program.has_backward
    assert not program.is_split


def test_a_split_program():
    program = build("zero_bubble", Placement("loop", 2, 1), 2)
    assert table_of(program.rows) == lines("""
                 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1
        1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1
    """)
    assert program.is_split
    # Rank 1 holds both micro-batches until their weight gradients, where whole backwards would free the first one.
    assert peaks(program) == [2, 2]
    assert peaks(build("1f1b", Placement("loop", 2, 1), 2)) == [2, 1]


def test_a_program_in_both_directions():
    program = build("interleaved_1f1b", Placement("loop", 2, 1, BI), 2)
    assert table_of(program.rows) == lines("""
        1RECV_F1 0F0 0SEND_F0 1F1 0RECV_B0 1B1 1SEND_B1 0B0
        1RECV_F0 0F1 0SEND_F1 1F0 0RECV_B1 1B0 1SEND_B0 0B1
    """)
    assert program.slots == ({(1, 1): 0, (0, 0): 1}, {(1, 0): 0, (0, 1): 1})
    assert peaks(program) == [2, 2]


@pytest.mark.parametrize(("table", "is_split", "has_backward"), [
    ("0F0 0B0 0F1 0I1 0W1", True, True),  # one split backward is enough
    ("0F0 0B0 0F1 0B1", False, True),
    ("0F0 0F1", False, False),
])
def test_what_it_says_about_its_kinds(table, is_split, has_backward):
    program = complete("by hand", rows_of(table), Placement("loop", 1, 1), 2, 1)
    assert (program.is_split, program.has_backward) == (is_split, has_backward)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
def test_its_evaluation(schedule):
    evaluation = forward_only(build(schedule, Placement("wave", 2, 2), 2))
    assert table_of(evaluation.rows) == lines("""
        0F0 0SEND_F0 3RECV_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1
        1RECV_F0 1F0 1RECV_F1 2F0 2SEND_F0 1F1 2F1 2SEND_F1
    """)
    assert not evaluation.has_backward
    assert not evaluation.is_split
    assert [evaluation.num_slots(rank) for rank in range(2)] == [2, 2]


def test_its_evaluation_in_both_directions():
    evaluation = forward_only(build("auto", Placement("loop", 2, 1, BI), 3))
    assert table_of(evaluation.rows) == lines("""
        1RECV_F1 0F0 0SEND_F0 1F1 0F2 0SEND_F2
        1RECV_F0 0F1 0SEND_F1 1RECV_F2 1F0 1F2
    """)


def test_a_large_program():
    p, v, m = 32, 4, 256
    placement = Placement("loop", p, v)
    program = build("interleaved_1f1b", placement, m)
    verify(program)
    timeline = simulate(program, Costs.uniform(placement))
    assert timeline.makespan == pytest.approx(m * 3 + (p - 1) * 3 / v, rel=1e-12)
    assert sum(map(len, timeline.spans)) == 2 * p * v * m
    assert sum(timeline.messages.values()) == 2 * (p * v - 1) * m
    assert set(timeline.messages) == {(rank, (rank + step) % p) for rank in range(p) for step in (1, -1)}
    assert [program.peak_in_flight(rank) * v for rank in (0, 15, 31)] == [128, 113, 97]


def test_a_large_search():
    p, v, m = 32, 4, 400  # large: only the most promising groups and orders are tried
    placement = Placement("wave", p, v, BI)
    started = process_time()
    program = build("auto", placement, m)
    assert process_time() - started < 30
    costs = Costs.uniform(placement)
    assert simulate(program, costs).makespan == pytest.approx(lower_bound(placement, m, costs, split=True), rel=1e-9)
    assert max(peaks(program)) <= p
