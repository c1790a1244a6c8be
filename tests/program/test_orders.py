"""The compute orders, as tables and as properties."""

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.actions import Action
from deepspeed_prt.program.orders import HOLD_EVERYTHING, ORDERS
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import build
from deepspeed_prt.program.simulator import Costs, ideal_time, lower_bound, simulate

from .common import lines, programs, table_of


def compute_table(schedule, name, ranks, reuse, micro_batches, cap=None):
    return table_of(build(schedule, Placement(name, ranks, reuse), micro_batches, cap).compute_rows())


# The odd cases first.


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("name", ["loop", "wave"])
def test_one_rank_one_micro_batch(schedule, name):
    assert compute_table(schedule, name, 1, 1, 1) == ["0F0 0B0"]


@pytest.mark.parametrize("schedule", sorted(ORDERS.keys() - {"1f1b"}))
def test_one_micro_batch_goes_there_and_back(schedule):
    assert compute_table(schedule, "loop", 2, 2, 1) == lines("""
        0F0 2F0 2B0 0B0
        1F0 3F0 3B0 1B0
    """)
    assert compute_table(schedule, "wave", 2, 2, 1) == lines("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
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


# The tables that stand in the modules' docstrings, and one of each shape.


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


# Properties.


@settings(max_examples=60, deadline=None)
@given(programs())
def test_every_forward_and_backward_once(program):
    counted = Counter((action, rank) for rank, row in enumerate(program.compute_rows()) for action in row)
    assert counted == {(Action(stage, kind, micro_batch), rank): 1
                       for stage, rank in enumerate(program.placement.route)
                       for micro_batch in range(program.micro_batches)
                       for kind in ("F", "B")}


@settings(max_examples=60, deadline=None)
@given(programs())
def test_gradients_of_a_stage_are_added_in_micro_batch_order(program):
    for stage, rank in enumerate(program.placement.route):
        added = [action.micro_batch for action in program.rows[rank] if action.kind == "B" and action.stage == stage]
        assert added == list(range(program.micro_batches))


@settings(max_examples=60, deadline=None)
@given(programs(schedules=["1f1b", "interleaved_1f1b"]))
def test_the_cap_is_kept(program):
    assert max(map(program.peak_in_flight, range(program.placement.ranks))) <= program.max_in_flight


@settings(max_examples=40, deadline=None)
@given(programs(schedules=HOLD_EVERYTHING))
def test_orders_that_hold_everything_run_all_forwards_first(program):
    for rank, row in enumerate(program.compute_rows()):
        half = program.micro_batches * program.placement.reuse
        assert {action.kind for action in row[:half]} == {"F"}
        assert {action.kind for action in row[half:]} == {"B"}
        assert program.peak_in_flight(rank) == program.micro_batches == program.max_in_flight


def loop(p_and_v, groups):
    ranks, reuse = p_and_v
    return Placement("loop", ranks, reuse), ranks * groups


loops_of_whole_groups = st.builds(loop, st.tuples(st.integers(1, 8), st.integers(1, 5)), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(loops_of_whole_groups)
def test_interleaved_in_a_loop_is_as_fast_as_its_formula(case):
    placement, m = case
    p, v = placement.ranks, placement.reuse
    unit = Costs((1, ) * placement.stages, (2, ) * placement.stages)  # whole numbers, so that times are exact
    makespan = simulate(build("interleaved_1f1b", placement, m), unit).makespan
    assert makespan == m * 3 * v + (p - 1) * 3
    assert makespan == lower_bound(placement, m, unit), "no order of whole backwards is faster"
    fractional = Costs.uniform(placement, 1, 2)
    assert simulate(build("interleaved_1f1b", placement, m), fractional).makespan == pytest.approx(
        m * 3 + (p - 1) * 3 / v, rel=1e-12)


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
@given(programs(schedules=["interleaved_1f1b"], names=["loop"]))
def test_with_any_number_of_micro_batches_it_holds_no_more_than_megatron(program):
    p, v, m = program.placement.ranks, program.placement.reuse, program.micro_batches
    for rank in range(p):
        held = program.peak_in_flight(rank) * v
        assert held <= min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v)


@pytest.mark.parametrize(("schedule", "reuse", "ratio"), [("1f1b", 1, 1.875), ("interleaved_1f1b", 4, 1.21875)])
def test_eight_ranks_eight_micro_batches(schedule, reuse, ratio):
    placement = Placement("loop", 8, reuse)
    costs = Costs.uniform(placement, 1, 2)
    makespan = simulate(build(schedule, placement, 8), costs).makespan
    assert makespan / ideal_time(placement, 8, costs) == pytest.approx(ratio, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3))
def test_reuse_in_a_loop_is_faster_than_1f1b(ranks, reuse, groups):
    placement = Placement("loop", ranks, reuse)
    micro_batches = ranks * groups
    reused = simulate(build("interleaved_1f1b", placement, micro_batches), Costs.uniform(placement, 1, 2))
    once = Placement("loop", ranks, 1)
    plain = simulate(build("1f1b", once, micro_batches), Costs.uniform(once, 1, 2))
    assert reused.makespan < plain.makespan
    assert reused.busy == pytest.approx(plain.busy)


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


# Refusals.


def test_1f1b_refuses_several_stages_a_rank():
    with pytest.raises(ValueError, match="'1f1b' has one stage per rank, got reuse 2: use schedule 'interleaved_1f1b'"):
        build("1f1b", Placement("loop", 2, 2), 4)


@pytest.mark.parametrize("cap", [0, 0.5, 0.999, -1])
def test_a_cap_below_one_micro_batch_is_refused(cap):
    with pytest.raises(ValueError, match=f"max_in_flight {cap:g} is too small"):
        build("interleaved_1f1b", Placement("loop", 2, 2), 4, cap)


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_a_wave_of_one_stage_a_rank_is_a_loop(micro_batches):
    wave, loop = (build("1f1b", Placement(name, 4, 1), micro_batches) for name in ("wave", "loop"))
    assert wave.compute_rows() == loop.compute_rows()
