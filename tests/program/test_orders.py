"""The compute orders, as tables and as properties."""

import re
from collections import Counter
from importlib import import_module
from itertools import takewhile

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import Action
from deepspeed_prt.program.bounds import lower_bound
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.orders import ORDERS
from deepspeed_prt.program.orders._list_scheduler import group_sizes, list_schedule
from deepspeed_prt.program.orders.zero_bubble import zero_bubble
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete
from deepspeed_prt.program.simulator import simulate
from deepspeed_prt.program.verifier import verify

from .common import (
    BI,
    DIRECTIONS,
    HOLD_EVERYTHING,
    NAMES,
    UNI,
    lines,
    peaks,
    placements,
    programs,
    table_of,
    whole_costs,
)

ANY_REUSE = sorted(ORDERS.keys() - {"1f1b", "zbv"})
WHOLE = [schedule for schedule in ANY_REUSE if not ORDERS[schedule].is_split]
SPLIT = [schedule for schedule in ANY_REUSE if ORDERS[schedule].is_split]


def compute_table(schedule, name, ranks, reuse, micro_batches, cap=None, direction=UNI):
    return table_of(build(schedule, Placement(name, ranks, reuse, direction), micro_batches, cap).compute_rows())


def makespan(program):
    """With F = I = W, so that a whole backward takes twice as long as a forward."""
    return simulate(program, Costs.uniform(program.placement)).makespan


# The odd cases first.


@pytest.mark.parametrize("schedule", ["1f1b", *ANY_REUSE])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_one_micro_batch(schedule, name):
    backward = "0I0 0W0" if ORDERS[schedule].is_split else "0B0"
    assert compute_table(schedule, name, 1, 1, 1) == [f"0F0 {backward}"]


@pytest.mark.parametrize("schedule", WHOLE)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_micro_batch_goes_there_and_back(schedule, direction):
    # Nothing comes up where there is but one micro-batch.
    assert compute_table(schedule, "loop", 2, 2, 1, direction=direction) == lines("""
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
    """)
    assert compute_table(schedule, "wave", 2, 2, 1, direction=direction) == lines("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_micro_batch_there_and_back_with_weight_gradients_in_the_gaps(schedule, direction):
    assert compute_table(schedule, "loop", 2, 2, 1, direction=direction) == lines("""
        0F0 2F0 2I0 2W0 0I0 0W0
        1F0 3F0 3I0 3W0 1I0 1W0
    """)
    assert compute_table(schedule, "wave", 2, 2, 1, direction=direction) == lines("""
        0F0 3F0 3I0 3W0 0I0 0W0
        1F0 2F0 2I0 1I0 2W0 1W0
    """)


def test_1f1b_on_one_rank():
    assert compute_table("1f1b", "loop", 1, 1, 3) == ["0F0 0B0 0F1 0B1 0F2 0B2"]


def test_1f1b_on_two_ranks_with_an_odd_number_of_micro_batches():
    expected = lines("""
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """)
    assert compute_table("1f1b", "loop", 2, 1, 3) == expected
    assert compute_table("1f1b", "wave", 2, 1, 3) == expected, "with one stage a rank the placements are the same"


def test_1f1b_with_fewer_micro_batches_than_ranks():
    assert compute_table("1f1b", "loop", 4, 1, 2) == lines("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
        3F0 3B0 3F1 3B1
    """)


def test_interleaved_with_fewer_micro_batches_than_ranks():
    assert compute_table("interleaved_1f1b", "loop", 3, 2, 2) == lines("""
        0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1
        1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1
        2F0 2F1 5F0 5B0 5F1 5B1 2B0 2B1
    """)


def test_interleaved_with_an_odd_number_of_micro_batches():
    assert compute_table("interleaved_1f1b", "loop", 2, 2, 3) == lines("""
        0F0 0F1 2F0 2F1 2B0 0F2 2B1 2F2 0B0 0B1 2B2 0B2
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3F2 1B1 3B2 1B2
    """)


def test_interleaved_on_one_rank_in_a_wave_is_one_micro_batch_after_the_other():
    assert compute_table("interleaved_1f1b", "wave", 1, 2, 2) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]


def test_zero_bubble_on_one_rank():
    assert compute_table("zero_bubble", "loop", 1, 1, 2) == ["0F0 0I0 0W0 0F1 0I1 0W1"]
    assert compute_table("zero_bubble", "loop", 1, 2, 2) == ["0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1"]


def test_zero_bubble_on_two_ranks_with_an_odd_number_of_micro_batches():
    assert compute_table("zero_bubble", "loop", 2, 1, 3) == lines("""
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """)


def test_zero_bubble_with_fewer_micro_batches_than_ranks():
    # The input gradients of stages 0 to 2 are a weight gradient apart, so those fill the gaps.
    assert compute_table("zero_bubble", "loop", 4, 1, 2) == lines("""
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1F1 1I0 1W0 1I1 1W1
        2F0 2F1 2I0 2W0 2I1 2W1
        3F0 3I0 3F1 3I1 3W0 3W1
    """)


def test_two_pipes_on_two_ranks_with_an_odd_number_of_micro_batches():
    assert compute_table("1f1b", "loop", 2, 1, 3, direction=BI) == lines("""
        0F0 1F1 1B1 0B0 0F2 0B2
        0F1 1F0 1B0 0B1 1F2 1B2
    """)
    assert compute_table("zero_bubble", "loop", 2, 1, 3, direction=BI) == lines("""
        0F0 1F1 1I1 0I0 1W1 0F2 0W0 0I2 0W2
        0F1 1F0 1I0 0I1 1W0 0W1 1F2 1I2 1W2
    """)


def test_two_pipes_with_fewer_micro_batches_than_ranks():
    assert compute_table("1f1b", "loop", 4, 1, 1, direction=BI) == lines("""
        0F0 0B0
        1F0 1B0
        2F0 2B0
        3F0 3B0
    """)
    assert compute_table("1f1b", "loop", 4, 1, 2, direction=BI) == lines("""
        0F0 3F1 3B1 0B0
        1F0 2F1 2B1 1B0
        1F1 2F0 2B0 1B1
        0F1 3F0 3B0 0B1
    """)
    assert compute_table("1f1b", "loop", 4, 1, 3, direction=BI) == lines("""
        0F0 0F2 3F1 3B1 0B0 0B2
        1F0 2F1 1F2 2B1 1B0 1B2
        1F1 2F0 2F2 2B0 1B1 2B2
        0F1 3F0 3B0 3F2 3B2 0B1
    """)


def test_two_pipes_on_an_odd_number_of_ranks():
    # The middle rank has stage 1 of both pipes, so that all its micro-batches are of one stage.
    assert compute_table("1f1b", "loop", 3, 1, 3, direction=BI) == lines("""
        0F0 0F2 2F1 2B1 0B0 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
        0F1 2F0 2B0 2F2 2B2 0B1
    """)
    assert compute_table("backward_first", "wave", 3, 2, 2, direction=BI) == lines("""
        0F0 2F1 3F1 5F0 5B0 3B1 2B1 0B0
        1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1
        0F1 2F0 3F0 5F1 5B1 3B0 2B0 0B1
    """)


# The tables that stand in the modules' docstrings, and one of each shape.


DOCUMENTED = {
    "one_f_one_b": [("1f1b", Placement("loop", 4, 1), 4)],
    "interleaved_1f1b": [("interleaved_1f1b", Placement("loop", 2, 2), 4),
                         ("interleaved_1f1b", Placement("loop", 2, 1, BI), 4)],
    "backward_first": [("backward_first", Placement("wave", 2, 2), 2)],
    "alternating": [("alternating", Placement("loop", 2, 1), 3)],
    "breadth_first": [("breadth_first", Placement("loop", 2, 2), 2)],
    "gpipe": [("gpipe", Placement("loop", 2, 2), 2)],
    "zero_bubble": [("zero_bubble", Placement("loop", 2, 2), 2)],
    "zbv": [("zbv", Placement("wave", 2, 2), 2)],
    "half_memory": [],
    "third_memory": [],
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_the_tables_in_the_docstrings_are_what_the_orders_give(module):
    documentation = import_module(f"deepspeed_prt.program.orders.{module}").__doc__
    written = re.findall(r"^ +rank \d+: (.*)$", documentation, re.MULTILINE)
    assert written == [row for case in DOCUMENTED[module] for row in table_of(build(*case).compute_rows())]


def test_every_order_is_documented():
    assert {schedule.order.__module__.rpartition(".")[2] for schedule in ORDERS.values()} == set(DOCUMENTED)


def test_1f1b():
    assert compute_table("1f1b", "loop", 4, 1, 4) == lines("""
        0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3
    """)


def test_1f1b_within_half_the_memory():
    assert compute_table("1f1b", "loop", 4, 1, 4, cap=2) == lines("""
        0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3
    """)


def test_interleaved_1f1b():
    assert compute_table("interleaved_1f1b", "loop", 2, 2, 4) == lines("""
        0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_interleaved_1f1b_within_one_micro_batch():
    assert compute_table("interleaved_1f1b", "loop", 2, 2, 2, cap=1) == lines("""
        0F0 2F0 2B0 0F1 0B0 2F1 2B1 0B1
        1F0 3F0 3B0 1F1 1B0 3F1 3B1 1B1
    """)


def test_interleaved_1f1b_in_a_wave():
    assert compute_table("interleaved_1f1b", "wave", 2, 2, 4) == lines("""
        0F0 0F1 3F0 3B0 3F1 3B1 0F2 0B0 0F3 0B1 3F2 3B2 3F3 3B3 0B2 0B3
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 1F2 2F2 1F3 2F3 2B2 1B2 2B3 1B3
    """)


def test_backward_first_in_a_wave():
    assert compute_table("backward_first", "wave", 2, 2, 2) == lines("""
        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """)


def test_both_directions_on_two_ranks_are_two_1f1bs_in_turn():
    # Chimera: each rank starts with its own stage 0, so that nobody waits.
    program = build("1f1b", Placement("loop", 2, 1, BI), 4)
    assert table_of(program.compute_rows()) == lines("""
        0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2
        0F1 1F0 1B0 0B1 0F3 1F2 1B2 0B3
    """)
    assert makespan(program) == 4 * 3, "no bubble"


def test_both_directions_on_four_ranks():
    program = build("1f1b", Placement("loop", 4, 1, BI), 4)
    assert table_of(program.compute_rows()) == lines("""
        0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2
        1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
        1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
        0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3
    """)
    assert makespan(program) == 16, "as Chimera: a bubble of (p-2)/(3m/2 + p-2)"


def test_both_directions_with_reuse_in_a_loop():
    program = build("interleaved_1f1b", Placement("loop", 2, 2, BI), 4)
    assert table_of(program.compute_rows()) == lines("""
        0F0 1F1 2F0 3F1 3B1 2B0 1B1 0B0 0F2 1F3 2F2 3F3 3B3 2B2 1B3 0B2
        0F1 1F0 2F1 3F0 3B0 2B1 1B0 0B1 0F3 1F2 2F3 3F2 3B2 2B3 1B2 0B3
    """)
    assert makespan(program) == 4 * 3


def test_both_directions_with_reuse_in_a_wave():
    # 1F1 2F1 and 2B1 1B1 on rank 0: the up pipe turns there, as the down pipe turns on rank 1.
    program = build("interleaved_1f1b", Placement("wave", 2, 2, BI), 4)
    assert table_of(program.compute_rows()) == lines("""
        0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0 0F2 1F3 2F3 3F2 3B2 2B3 1B3 0B2
        0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1 0F3 1F2 2F2 3F3 3B3 2B2 1B2 0B3
    """)
    assert makespan(program) == 4 * 3


def test_gpipe_takes_forwards_as_they_arrive():
    assert compute_table("gpipe", "loop", 2, 2, 2) == lines("""
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)
    assert compute_table("gpipe", "loop", 2, 2, 3) == lines("""
        0F0 0F1 2F0 0F2 2F1 2F2 2B0 2B1 0B0 2B2 0B1 0B2
        1F0 1F1 3F0 1F2 3F1 3F2 3B0 3B1 1B0 3B2 1B1 1B2
    """)


def test_breadth_first_takes_one_stage_after_the_other():
    assert compute_table("breadth_first", "loop", 2, 2, 2) == lines("""
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)
    assert compute_table("breadth_first", "loop", 2, 2, 3) == lines("""
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
    """)


def test_gpipe_and_breadth_first_in_a_wave():
    assert compute_table("gpipe", "wave", 2, 2, 2) == lines("""
        0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """)
    assert compute_table("breadth_first", "wave", 2, 2, 2) == lines("""
        0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1
        1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1
    """)


def test_gpipe_and_breadth_first_in_both_directions():
    assert compute_table("gpipe", "loop", 2, 1, 3, direction=BI) == lines("""
        0F0 1F1 0F2 1B1 0B0 0B2
        0F1 1F0 1F2 1B0 0B1 1B2
    """)
    assert compute_table("breadth_first", "loop", 2, 1, 4, direction=BI) == lines("""
        0F0 0F2 1F1 1F3 1B1 1B3 0B0 0B2
        0F1 0F3 1F0 1F2 1B0 1B2 0B1 0B3
    """)


def test_zero_bubble():
    # On the last rank the weight gradients come when all else is done; on the others they fill the gaps.
    assert compute_table("zero_bubble", "loop", 4, 1, 4) == lines("""
        0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1F2 1F3 1I0 1W0 1I1 1W1 1I2 1W2 1I3 1W3
        2F0 2F1 2F2 2I0 2F3 2I1 2W0 2I2 2W1 2I3 2W2 2W3
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
    """)


def test_zero_bubble_with_reuse_in_a_loop():
    assert compute_table("zero_bubble", "loop", 2, 2, 2) == lines("""
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 0I0 0I1 2W1 0W0 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1
    """)


@pytest.mark.parametrize(("split_from", "table"), [
    (1, """
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 0B0 0B1 2W1
        1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1
    """),
    (2, """
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0B0 0B1
        1F0 1F1 3F0 3I0 3F1 3I1 1B0 1B1 3W0 3W1
    """),
    (3, """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3I0 3F1 3I1 1B0 1B1 3W0 3W1
    """),
])
def test_zero_bubble_may_keep_the_backwards_of_the_first_stages_whole(split_from, table):
    placement = Placement("loop", 2, 2)
    rows = zero_bubble(placement, 2, 2, Costs.uniform(placement), split_from)
    assert table_of(rows) == lines(table)
    program = complete("by hand", rows, placement, 2, 2)
    verify(program)
    assert program.split_stages == set(range(split_from, 4))


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(1, 9), st.data())
def test_any_part_of_the_stages_may_be_split(placement, micro_batches, data):
    split_from = data.draw(st.integers(0, placement.stages))
    cap = data.draw(st.integers(1, placement.ranks))
    rows = zero_bubble(placement, micro_batches, cap, data.draw(whole_costs(placement)), split_from)
    program = complete("by hand", rows, placement, micro_batches, cap)
    verify(program)
    assert program.split_stages == set(range(split_from, placement.stages))


def test_zero_bubble_in_both_directions():
    program = build("zero_bubble", Placement("loop", 2, 1, BI), 4)
    assert table_of(program.compute_rows()) == lines("""
        0F0 1F1 1I1 0I0 1W1 0F2 0W0 1F3 1I3 0I2 1W3 0W2
        0F1 1F0 1I0 0I1 1W0 0F3 0W1 1F2 1I2 0I3 1W2 0W3
    """)
    assert makespan(program) == 4 * 3
    program = build("zero_bubble", Placement("wave", 2, 2, BI), 2)
    assert table_of(program.compute_rows()) == lines("""
        0F0 1F1 2F1 3F0 3I0 2I1 1I1 0I0 3W0 2W1 1W1 0W0
        0F1 1F0 2F0 3F1 3I1 2I0 1I0 0I1 3W1 2W0 1W0 0W1
    """)
    assert makespan(program) == 2 * 3


def test_zbv():
    assert compute_table("zbv", "wave", 2, 2, 2) == lines("""
        0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """)
    program = build("zbv", Placement("wave", 3, 2), 3)
    assert table_of(program.compute_rows()) == lines("""
        0F0 0F1 0F2 5F0 5I0 5F1 5I1 5F2 5I2 0I0 5W0 0I1 5W1 0I2 5W2 0W0 0W1 0W2
        1F0 1F1 1F2 4F0 4F1 4I0 4F2 4I1 1I0 4I2 1I1 4W0 1I2 4W1 1W0 4W2 1W1 1W2
        2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3I1 2I1 3I2 2I2 3W0 2W0 3W1 2W1 3W2 2W2
    """)
    assert makespan(program) == 3 * 3 + 2 / 2, "the last rank's work and its wait for the first micro-batch"
    assert peaks(program) == [3, 3, 3]


def test_half_memory():
    program = build("half_memory", Placement("wave", 4, 2), 4)
    assert table_of(program.compute_rows()) == lines("""
        0F0 0F1 0F2 0F3 7F0 7I0 7F1 7I1 7W0 7W1 0I0 7F2 0I1 7I2 0W0 0W1 7F3 7I3 7W2 7W3 0I2 0W2 0I3 0W3
        1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6I1 6W1 1I0 6F2 1I1 1W0 1W1 6I2 6F3 6W2 6I3 1I2 6W3 1W2 1I3 1W3
        2F0 2F1 2F2 5F0 2F3 5F1 5I0 5W0 5I1 2I0 5F2 2I1 5W1 2W0 2W1 5F3 5I2 5W2 2I2 5I3 2W2 5W3 2I3 2W3
        3F0 4F0 3F1 4F1 3F2 4F2 4I0 3I0 4I1 3I1 4W0 3F3 3W0 4F3 4W1 3W1 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3
    """)
    assert peaks(program) == [3, 3, 3, 3]


def test_half_and_third_memory_with_one_stage_a_rank():
    assert compute_table("half_memory", "loop", 4, 1, 4) == lines("""
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1F2 1I0 1W0 1I1 1W1 1F3 1I2 1W2 1I3 1W3
        2F0 2F1 2F2 2I0 2W0 2I1 2W1 2I2 2W2 2F3 2I3 2W3
        3F0 3I0 3F1 3I1 3F2 3I2 3W0 3W1 3W2 3F3 3I3 3W3
    """)
    assert compute_table("third_memory", "loop", 4, 1, 4) == lines("""
        0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1W0 1I1 1W1 1F2 1F3 1I2 1W2 1I3 1W3
        2F0 2F1 2I0 2W0 2I1 2W1 2F2 2F3 2I2 2W2 2I3 2W3
        3F0 3I0 3F1 3I1 3W0 3W1 3F2 3I2 3F3 3I3 3W2 3W3
    """)


# Properties.


@settings(max_examples=60, deadline=None)
@given(programs())
def test_every_forward_and_backward_once(program):
    counted = Counter()
    for rank, row in enumerate(program.compute_rows()):
        for stage, kind, micro_batch in row:
            for half in {"F": "F", "B": "IW", "I": "I", "W": "W"}[kind]:
                counted[stage, half, micro_batch, rank] += 1
    routes = program.placement.routes
    assert counted == {(stage, half, micro_batch, rank): 1
                       for micro_batch in range(program.micro_batches)
                       for stage, rank in enumerate(routes[micro_batch % len(routes)])
                       for half in "FIW"}


@settings(max_examples=60, deadline=None)
@given(programs())
def test_gradients_of_a_stage_are_added_in_micro_batch_order(program):
    pipes = len(program.placement.routes)
    for pipe, route in enumerate(program.placement.routes):
        for stage, rank in enumerate(route):
            added = [action.micro_batch for action in program.rows[rank]
                     if action.kind in ("B", "W") and action.stage == stage and action.micro_batch % pipes == pipe]
            assert added == list(range(pipe, program.micro_batches, pipes))


@settings(max_examples=60, deadline=None)
@given(programs(schedules=sorted(ORDERS.keys() - set(HOLD_EVERYTHING))))
def test_the_cap_is_kept(program):
    assert max(peaks(program)) <= program.max_in_flight


@settings(max_examples=40, deadline=None)
@given(programs(schedules=HOLD_EVERYTHING))
def test_orders_that_hold_everything_run_all_forwards_first(program):
    for rank, row in enumerate(program.compute_rows()):
        half = program.micro_batches * program.placement.reuse
        assert {action.kind for action in row[:half]} == {"F"}
        assert {action.kind for action in row[half:]} <= {"B", "I", "W"}
        assert program.peak_in_flight(rank) == program.micro_batches == program.max_in_flight


@settings(max_examples=30, deadline=None)
@given(placements(ranks=6), st.integers(1, 8), st.data())
def test_orders_are_deterministic(placement, micro_batches, data):
    schedule = data.draw(st.sampled_from([*ANY_REUSE, "auto"]))
    costs = data.draw(whole_costs(placement))
    assert build(schedule, placement, micro_batches, costs=costs) == build(schedule, placement, micro_batches,
                                                                           costs=costs)


def loop(p_and_v, groups):
    ranks, reuse = p_and_v
    return Placement("loop", ranks, reuse), ranks * groups


loops_of_whole_groups = st.builds(loop, st.tuples(st.integers(1, 8), st.integers(1, 5)), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(loops_of_whole_groups)
def test_interleaved_in_a_loop_is_as_fast_as_its_formula(case):
    placement, m = case
    p, v = placement.ranks, placement.reuse
    unit = Costs((1, ) * (p * v), (1, ) * (p * v), (1, ) * (p * v))  # whole numbers, so that times are exact
    program = build("interleaved_1f1b", placement, m)
    assert simulate(program, unit).makespan == m * 3 * v + (p - 1) * 3
    assert lower_bound(placement, m, unit, split=False) == m * 3 * v + (p - 1) * 3, "no whole backwards are faster"
    assert makespan(program) == pytest.approx(m * 3 + (p - 1) * 3 / v, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(loops_of_whole_groups)
def test_interleaved_in_a_loop_holds_no_more_than_megatron(case):
    placement, m = case
    p, v = placement.ranks, placement.reuse
    program = build("interleaved_1f1b", placement, m)
    for rank in range(p):
        held = program.peak_in_flight(rank) * v
        assert held <= min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v)
        assert held <= min(p * v - rank, m * v), "and no more than its own docstring says"


@settings(max_examples=60, deadline=None)
@given(programs(schedules=["interleaved_1f1b"], names=["loop"], directions=[UNI]))
def test_with_any_number_of_micro_batches_it_holds_no_more_than_megatron(program):
    p, v, m = program.placement.ranks, program.placement.reuse, program.micro_batches
    for rank in range(p):
        held = program.peak_in_flight(rank) * v
        assert held <= min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3))
def test_reuse_in_a_loop_is_faster_than_1f1b(ranks, reuse, groups):
    micro_batches = ranks * groups
    reused = build("interleaved_1f1b", Placement("loop", ranks, reuse), micro_batches)
    assert makespan(reused) < makespan(build("1f1b", Placement("loop", ranks, 1), micro_batches))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12))
def test_with_one_stage_a_rank_interleaved_in_a_loop_is_1f1b(ranks, micro_batches):
    rows = build("interleaved_1f1b", Placement("loop", ranks, 1), micro_batches).compute_rows()
    for rank, row in enumerate(rows):
        ahead = min(ranks - 1 - rank, micro_batches)
        alternating = micro_batches - ahead
        assert "".join(action.kind for action in row) == ahead * "F" + alternating * "FB" + ahead * "B"
        for kind in ("F", "B"):
            assert [action for action in row if action.kind == kind] == [
                Action(rank, kind, micro_batch) for micro_batch in range(micro_batches)]


def test_how_far_each_rank_of_a_loop_runs_ahead():
    rows = build("interleaved_1f1b", Placement("loop", 3, 3), 6).compute_rows()
    assert ["".join(action.kind for action in row) for row in rows] == [
        8 * "F" + 10 * "FB" + 8 * "B",
        7 * "F" + 11 * "FB" + 7 * "B",
        6 * "F" + 12 * "FB" + 6 * "B",
    ]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("schedule", sorted(ORDERS.keys() - {"zbv"}))
def test_a_wave_of_one_stage_a_rank_is_a_loop(schedule, micro_batches, direction):
    wave, loop = (build(schedule, Placement(name, 4, 1, direction), micro_batches) for name in ("wave", "loop"))
    assert wave.rows == loop.rows


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(1, 3), st.sampled_from(NAMES),
       st.sampled_from(["gpipe", "breadth_first", "interleaved_1f1b", "zero_bubble"]), st.integers(1, 3))
def test_a_rank_does_in_one_pipe_what_its_mirror_does_in_the_other(ranks, reuse, name, schedule, groups):
    rows = build(schedule, Placement(name, ranks, reuse, BI), ranks * groups).compute_rows()
    for rank, row in enumerate(rows):
        assert rows[ranks - 1 - rank] == tuple(action._replace(micro_batch=action.micro_batch ^ 1) for action in row)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reuse", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 6), (4, 4), (4, 8), (6, 6), (6, 12), (8, 8), (8, 16)])
def test_both_directions_are_faster_than_one(name, reuse, ranks, micro_batches):
    both = build("interleaved_1f1b", Placement(name, ranks, reuse, BI), micro_batches)
    one = build("interleaved_1f1b", Placement("loop", ranks, reuse), micro_batches)
    assert makespan(both) < makespan(one)


# What the list scheduler of the first release took, whose groups were the largest that fit; p, v, m, cap.
IN_A_WAVE = {
    (2, 2, 4, None): 14.5,
    (4, 2, 8, None): 32.5,
    (4, 4, 8, None): 29.25,
    (5, 3, 7, None): 92 / 3,
    (8, 2, 8, None): 38,
    (8, 4, 16, None): 61.25,
    # A cap between the halves of p: 2 of 3, 5 and 6 ranks.
    (3, 4, 8, 2): 31.75,
    (5, 2, 5, 2): 38,
    (6, 4, 8, 2): 58.75,
    (6, 4, 16, 2): 111.75,
    (8, 2, 4, 2): 57.5,
}


@pytest.mark.parametrize("case", IN_A_WAVE)
def test_interleaved_in_a_wave_is_no_slower_than_it_was(case):
    p, v, m, cap = case
    assert makespan(build("interleaved_1f1b", Placement("wave", p, v), m, cap)) <= IN_A_WAVE[case] * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 20))
def test_zero_bubble_reaches_the_bound_of_a_loop(ranks, reuse, more):
    """With any number of micro-batches from p on; with reuse 1 as ZB-H1 does."""
    program = build("zero_bubble", Placement("loop", ranks, reuse), ranks + more)
    assert makespan(program) == pytest.approx(3 * (ranks + more) + (ranks - 1) / reuse, rel=1e-9)
    assert max(peaks(program)) <= ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 5), (4, 7), (4, 9), (5, 9), (8, 9), (8, 17)])
def test_zero_bubble_in_both_directions_with_an_odd_number_of_micro_batches(ranks, micro_batches):
    program = build("zero_bubble", Placement("loop", ranks, 1, BI), micro_batches)
    assert makespan(program) == 3 * micro_batches + (ranks - 1) // 2


@pytest.mark.parametrize(("reuse", "in_turn", "backward_first"), [(1, 61, 65), (2, 58, 57.5)])
def test_forwards_in_turn_with_backwards_on_eight_ranks(reuse, in_turn, backward_first):
    placement = Placement("loop", 8, reuse, BI)
    assert [makespan(build(name, placement, 16)) for name in ("alternating", "backward_first")] \
        == pytest.approx([in_turn, backward_first])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(DIRECTIONS), st.sampled_from([2, 4, 6, 8]), st.integers(2, 4),
       st.integers(1, 3))
def test_zero_bubble_reaches_the_bound_as_its_docstring_says(name, direction, ranks, reuse, groups):
    placement = Placement(name, ranks, reuse, direction)
    program = build("zero_bubble", placement, ranks * groups)
    wait = (ranks - 1 if direction == UNI else ranks // 2 - 1) / reuse
    assert makespan(program) == pytest.approx(3 * ranks * groups + wait, rel=1e-9)
    assert max(peaks(program)) <= ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_rank_of_zbv_holds_as_much(ranks, groups):
    assert peaks(build("zbv", Placement("wave", ranks, 2), ranks * groups)) == [ranks] * ranks


@pytest.mark.parametrize(("schedule", "ranks", "held"), [
    ("half_memory", 4, 3), ("half_memory", 8, 5), ("half_memory", 16, 9),
    ("third_memory", 6, 3), ("third_memory", 15, 6),
])
def test_the_memory_that_the_docstrings_promise(schedule, ranks, held):
    program = build(schedule, Placement("wave", ranks, 2), 2 * ranks)
    assert peaks(program) == [held] * ranks


@pytest.mark.parametrize("reuse", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "thirds"), [(1, 4), (2, 5), (3, 6), (4, 7), (5, 8)])
def test_a_third_of_the_memory_in_parts_of_a_micro_batch(ranks, thirds, reuse):
    # p/3 + 1 micro-batches, in stages: of 4 ranks with reuse 3 that are 7 and not, for rounding, 6.
    program = build("third_memory", Placement("wave", ranks, reuse), 3 * ranks)
    assert max(peaks(program)) * reuse <= thirds * reuse // 3
    if ranks > 1:
        assert max(peaks(program)) * reuse == min(thirds * reuse // 3, ranks * 3 * reuse)


@pytest.mark.parametrize("schedule", ["half_memory", "third_memory"])
def test_less_than_half_or_a_third_where_the_cap_is_less(schedule):
    assert max(peaks(build(schedule, Placement("wave", 8, 2), 16, 2))) == 2
    assert build(schedule, Placement("wave", 8, 2), 16, 16).rows == build(schedule, Placement("wave", 8, 2), 16).rows


@pytest.mark.parametrize(("schedule", "name", "direction", "reuse", "micro_batches", "ratio"), [
    ("zero_bubble", "loop", BI, 4, 8, 1.0454), ("zero_bubble", "loop", BI, 4, 16, 1.0227),
    ("zero_bubble", "loop", BI, 8, 16, 1.0216), ("zero_bubble", "wave", UNI, 4, 16, 1.0438),
    ("zero_bubble", "wave", BI, 4, 16, 1.0221), ("alternating", "loop", BI, 4, 16, 1.0829)])
def test_where_messages_take_time_ranks_warm_up_as_if_they_took_none(schedule, name, direction, reuse, micro_batches,
                                                                     ratio):
    """On 8 ranks, with a latency of a hundredth of a rank's forward: to the ideal, and what comes first."""
    placement = Placement(name, 8, reuse, direction)
    costs = Costs.uniform(placement, latency=0.01)
    program, without = (build(schedule, placement, micro_batches, costs=assumed) for assumed in (costs, None))
    verify(program)
    assert simulate(program, costs).makespan / (3 * micro_batches) == pytest.approx(ratio, abs=1e-4)
    assert simulate(without, costs).makespan > 1.005 * simulate(program, costs).makespan
    for row, row_without in zip(program.compute_rows(), without.compute_rows(), strict=True):
        common = min(len(warmup_of(row)), len(warmup_of(row_without)))
        assert common >= 2 * reuse
        assert warmup_of(row)[:common] == warmup_of(row_without)[:common]


def warmup_of(row):
    return tuple((action.stage, action.micro_batch) for action in takewhile(lambda action: action.kind == "F", row))


@settings(deadline=None, max_examples=40)
@given(placement=placements(), micro_batches=st.integers(1, 9), data=st.data())
def test_a_list_schedule_begins_with_the_warmup_it_is_given_and_keeps_the_cap(placement, micro_batches, data):
    cap = data.draw(st.integers(1, placement.ranks))
    split_from = data.draw(st.sampled_from([0, placement.stages]))
    group, *others = group_sizes(placement, micro_batches)
    costs = Costs.uniform(placement, latency=data.draw(st.sampled_from([0.0, 0.1, 1.0])))
    first = list_schedule(placement, micro_batches, data.draw(st.sampled_from([group, *others])), cap,
                          Costs.uniform(placement), split_from, "forward")
    if first is None:
        return
    warmup = tuple(map(warmup_of, first.rows))
    scheduled = list_schedule(placement, micro_batches, group, cap, costs, split_from, "backward", warmup)
    if scheduled is None:
        return
    verify(complete("warmed_up", scheduled.rows, placement, micro_batches, cap))
    for row, begun in zip(scheduled.rows, warmup, strict=True):
        assert warmup_of(row)[:len(begun)] == begun
