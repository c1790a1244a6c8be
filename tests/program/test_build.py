"""From a name to a program: what is put together, by which defaults, and what is refused."""

import pytest

from deepspeed_prt.program.build import build, default_cap
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.orders import ORDERS
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.simulator import simulate
from deepspeed_prt.program.verifier import verify

from .common import BI, DIRECTIONS, lines, table_of

V = Placement("wave", 2, 2)  # the one placement, but for its ranks, that every order but 1f1b is for


@pytest.mark.parametrize(("schedule", "cap"), [
    ("1f1b", 4), ("interleaved_1f1b", 4), ("backward_first", 4), ("zero_bubble", 4), ("zbv", 4), ("auto", 4),
    ("a.csv", 4), ("package.module:function", 4),
    ("gpipe", 9), ("breadth_first", 9),
    ("half_memory", 3), ("third_memory", pytest.approx(4 / 3 + 1)),
])
def test_the_default_cap_is_that_of_1f1b_where_an_order_does_not_hold_more_or_less_by_definition(schedule, cap):
    assert default_cap(schedule, 4, 9) == cap


@pytest.mark.parametrize("schedule", [*ORDERS, "auto"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_name_makes_a_program_that_verifies(schedule, direction, micro_batches):
    placement = Placement("wave", 2, 1 if schedule == "1f1b" else 2, direction)
    program = build(schedule, placement, micro_batches)
    verify(program)
    assert (program.placement, program.micro_batches) == (placement, micro_batches)
    assert program.max_in_flight == default_cap(schedule, 2, micro_batches)
    assert program.schedule == schedule or schedule == "auto" and program.schedule in ORDERS


@pytest.mark.parametrize("schedule", sorted(ORDERS.keys() - {"1f1b"}))
def test_whole_orders_are_split_on_demand_and_split_ones_are_split(schedule):
    as_it_is, split = build(schedule, V, 3), build(schedule, V, 3, split=True)
    assert as_it_is.is_split == ORDERS[schedule].is_split
    assert split.is_split
    assert not any(action.kind == "B" for row in split.rows for action in row)
    verify(split)
    if ORDERS[schedule].is_split:
        assert split == as_it_is
        with pytest.raises(ValueError, match=f"schedule '{schedule}' splits the backward, which split_backward false "
                                             "forbids; leave split_backward out or choose another schedule"):
            build(schedule, V, 3, split=False)
    else:
        assert build(schedule, V, 3, split=False) == as_it_is


def test_a_whole_order_that_is_split_sends_its_gradients_sooner():
    whole, split = (build("1f1b", Placement("loop", 2, 1), 2, split=split) for split in (None, True))
    assert table_of(split.rows) == lines("""
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1
        1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1W0 1F1 1I1 1SEND_B1 1W1
    """)
    costs = Costs.uniform(whole.placement)
    assert [simulate(program, costs).makespan for program in (whole, split)] == [9, 8]


def test_costs_decide_where_an_order_minds_them():
    # A forward that takes three times as long had better start before the gradient that has just arrived.
    placement = Placement("loop", 2, 1)
    equal = build("zero_bubble", placement, 4)
    assert table_of(equal.compute_rows()) == lines("""
        0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1F3 1I3 1W2 1W3
    """)
    assert equal == build("zero_bubble", placement, 4, costs=Costs.uniform(placement))
    costs = Costs.uniform(placement, forward=3)
    adapted = build("zero_bubble", placement, 4, costs=costs)
    assert table_of(adapted.compute_rows()) == lines("""
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """)
    assert [simulate(program, costs).makespan for program in (equal, adapted)] == [25, 23]
    assert build("gpipe", placement, 3, costs=costs) == build("gpipe", placement, 3), "gpipe does not mind"


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "backward_first", "alternating", "zero_bubble", "zbv",
                                      "half_memory", "third_memory", "auto"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cap", [0, 0.5, 0.999, -1, float("nan")])
def test_a_cap_below_one_micro_batch_is_refused(schedule, direction, cap):
    with pytest.raises(ValueError, match=f"max_in_flight {cap:g} is too small: a rank holds at least 1 micro-batch"):
        build(schedule, Placement("wave", 2, 2, direction), 4, cap)


@pytest.mark.parametrize("schedule", [*ORDERS, "auto"])
def test_no_cap_at_all(schedule):
    placement = Placement("wave", 2, 1 if schedule == "1f1b" else 2, BI)
    program = build(schedule, placement, 9, float("inf"))
    assert program.rows == build(schedule, placement, 9, 9).rows, "no batch holds more than its micro-batches"
    verify(program)


@pytest.mark.parametrize(("arguments", "message"), [
    (("zero_babble", V, 4), "unknown schedule 'zero_babble': use one of auto, 1f1b, interleaved_1f1b, backward_first, "
                            "alternating, breadth_first, gpipe, zero_bubble, zbv, half_memory, third_memory$"),
    (("1F1B", V, 4), "unknown schedule '1F1B'"),
    (("", V, 4), "unknown schedule ''"),
    (("auto", V, 0), "at least 1 micro-batch, got 0"),
    (("gpipe", V, -3), "at least 1 micro-batch, got -3"),
    (("1f1b", V, 4), "'1f1b' has one stage per rank, got reuse 2: use schedule 'interleaved_1f1b' or reuse 1"),
    (("zbv", Placement("loop", 2, 2), 4),
     "'zbv' is for placement 'wave' with reuse 2, got 'loop' with reuse 2: use schedule 'zero_bubble'"),
    (("zbv", Placement("wave", 2, 3, BI), 4), "'zbv' is for .* got 'wave' with reuse 3"),
])
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)
