"""The program: the passes together, its size at scale, and what it says about itself."""

import pytest

from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import build, default_cap, forward_only
from deepspeed_prt.program.simulator import Costs, simulate
from deepspeed_prt.program.verifier import verify

from .common import lines, table_of


def test_auto_is_1f1b_and_interleaved_where_a_rank_has_several_stages():
    assert build("auto", Placement("loop", 3, 1), 2).schedule == "1f1b"
    assert build("auto", Placement("wave", 3, 2), 2).schedule == "interleaved_1f1b"


def test_a_whole_program():
    program = build("auto", Placement("loop", 2, 2), 1)
    assert table_of(program.rows) == lines("""
        2RECV_F0          0F0 0SEND_F0 2F0 2SEND_F0 2RECV_B0 0RECV_B0 2B0 2SEND_B0 0B0
        1RECV_F0 3RECV_F0 1F0 1SEND_F0 3F0          1RECV_B0          3B0 3SEND_B0 1B0 1SEND_B0
    """)
    assert program.slots == ({(2, 0): 0, (0, 0): 1}, {(1, 0): 0, (3, 0): 1})
    assert [program.num_slots(rank) for rank in range(2)] == [2, 2]
    assert [program.peak_in_flight(rank) for rank in range(2)] == [1, 1]
    assert program.has_backward


def test_its_evaluation():
    evaluation = forward_only(build("auto", Placement("wave", 2, 2), 2))
    assert table_of(evaluation.rows) == lines("""
        0F0 0SEND_F0 3RECV_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1
        1RECV_F0 1F0 1RECV_F1 2F0 2SEND_F0 1F1 2F1 2SEND_F1
    """)
    assert not evaluation.has_backward
    assert [evaluation.num_slots(rank) for rank in range(2)] == [2, 2]


@pytest.mark.parametrize(("schedule", "cap"), [("1f1b", 4), ("interleaved_1f1b", 4), ("a.csv", 4),
                                               ("gpipe", 9), ("breadth_first", 9)])
def test_the_default_cap_is_that_of_1f1b_where_an_order_does_not_hold_everything(schedule, cap):
    assert default_cap(schedule, 4, 9) == cap


@pytest.mark.parametrize(("arguments", "message"), [
    (("zero_bubble", Placement("loop", 2, 2), 4), "unknown schedule 'zero_bubble': use one of 1f1b, interleaved_1f1b"),
    (("1F1B", Placement("loop", 2, 1), 4), "unknown schedule '1F1B'"),
    (("auto", Placement("loop", 2, 2), 0), "at least 1 micro-batch, got 0"),
    (("gpipe", Placement("loop", 2, 2), -3), "at least 1 micro-batch, got -3"),
])
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_a_large_program():
    p, v, m = 64, 4, 512
    placement = Placement("loop", p, v)
    program = build("auto", placement, m)
    verify(program)
    timeline = simulate(program, Costs.uniform(placement, 1, 2))
    assert timeline.makespan == pytest.approx(m * 3 + (p - 1) * 3 / v, rel=1e-12)
    assert sum(map(len, timeline.spans)) == 2 * p * v * m
    assert sum(timeline.messages.values()) == 2 * (p * v - 1) * m
    assert set(timeline.messages) == {(rank, (rank + step) % p) for rank in range(p) for step in (1, -1)}
    assert [program.peak_in_flight(rank) * v for rank in (0, 31, 63)] == [256, 225, 193]
