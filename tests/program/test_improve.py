"""Local search on orders: no longer, within the cap, with the same actions, and shorter where it is known to be."""

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.improve import improve
from deepspeed_prt.program.orders import ORDERS
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete
from deepspeed_prt.program.simulator import simulate
from deepspeed_prt.program.verifier import verify

from .common import BI, peaks, programs, rows_of, table_of, whole_costs


def makespan(program, costs):
    return simulate(program, costs).makespan


@settings(max_examples=60, deadline=None)
@given(programs(schedules=[name for name in ORDERS if name != "auto"], ranks=4), st.data())
def test_the_same_actions_no_longer_and_within_the_cap(program, data):
    costs = data.draw(whole_costs(program.placement))
    improved = improve(program, costs, 40)
    verify(improved)
    assert [sorted(row) for row in improved.compute_rows()] == [sorted(row) for row in program.compute_rows()]
    assert makespan(improved, costs) <= makespan(program, costs)
    assert max(peaks(improved)) <= program.max_in_flight
    assert improved == improve(program, costs, 40), "deterministic"


def test_the_backward_that_another_rank_waits_for_comes_first():
    program = complete("custom", rows_of("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B1 1B0
    """), Placement("loop", 2, 1), 2, 2)
    costs = Costs((1, 1), (1, 1), (1, 3))
    improved = improve(program, costs, 10)
    assert (makespan(program, costs), makespan(improved, costs)) == (15, 13)
    assert table_of(improved.compute_rows())[1].split().index("1B0") < 3


@pytest.mark.parametrize(("reuse", "micro_batches", "over_ideal"),
                         [(4, 8, 108 / 96), (8, 8, 204 / 192), (4, 16, 210 / 192)])
def test_whole_backwards_in_both_directions_on_8_ranks(reuse, micro_batches, over_ideal):
    placement = Placement("loop", 8, reuse, BI)
    costs = Costs.uniform(placement)
    before = build("backward_first", placement, micro_batches)
    after = improve(before, costs, 100)
    assert makespan(after, costs) / (3 * micro_batches) == pytest.approx(over_ideal)
    assert makespan(before, costs) > makespan(after, costs) * 1.004


def test_no_changes_no_other_program():
    program = build("backward_first", Placement("loop", 4, 2, BI), 8)
    assert improve(program, Costs.uniform(program.placement), 0) is program


def test_what_no_order_can_beat_stays():
    program = build("zero_bubble", Placement("loop", 4, 2), 8)
    assert improve(program, Costs.uniform(program.placement), 100) is program
