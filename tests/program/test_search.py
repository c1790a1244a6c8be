"""The search behind "auto": the shortest within the cap, whole where that is as short, and the same each time."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.bounds import ideal_time, lower_bound
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.orders import ORDERS
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.simulator import simulate
from deepspeed_prt.program.verifier import verify

from .common import BI, DIRECTIONS, NAMES, lines, peaks, placements, programs, table_of, whole_costs


def makespan(program, costs=None):
    return simulate(program, costs or Costs.uniform(program.placement)).makespan


# The odd cases first.


@pytest.mark.parametrize("reuse", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_on_one_rank_splitting_gains_nothing(reuse, micro_batches):
    program = build("auto", Placement("loop", 1, reuse), micro_batches)
    assert not program.is_split
    assert makespan(program) == pytest.approx(3 * micro_batches)
    assert peaks(program) == [1]


def test_one_micro_batch():
    program = build("auto", Placement("loop", 2, 1), 1)
    assert table_of(program.compute_rows()) == lines("""
        0F0 0B0
        1F0 1I0 1W0
    """), "on rank 0 splitting gains nothing"
    assert makespan(program) == 5, "the weight gradient of rank 1 is off the way back"
    assert makespan(build("auto", Placement("loop", 2, 1), 1, split=False)) == 6


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize(("name", "reuse"), [("loop", 1), ("loop", 2), ("wave", 2)])
def test_in_both_directions_on_two_ranks_splitting_gains_nothing(name, reuse, micro_batches):
    program = build("auto", Placement(name, 2, reuse, BI), micro_batches)
    assert not program.is_split
    assert makespan(program) == 3 * micro_batches


def test_without_weight_gradients_to_speak_of_splitting_gains_nothing():
    placement = Placement("loop", 4, 2)
    costs = Costs.uniform(placement, 1, 2, 0)
    program = build("auto", placement, 8, costs=costs)
    assert not program.is_split
    assert makespan(program, costs) == pytest.approx(8 * 3 + 3 * 3 / 2)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "ranks", "reuse"), [("loop", 3, 1), ("loop", 4, 2), ("wave", 3, 2), ("wave", 4, 3)])
def test_fewer_micro_batches_than_ranks_and_odd_ones(name, ranks, reuse, direction, micro_batches):
    placement = Placement(name, ranks, reuse, direction)
    program = build("auto", placement, micro_batches)
    verify(program)
    costs = Costs.uniform(placement)
    bound = lower_bound(placement, micro_batches, costs, split=True)
    assert bound * (1 - 1e-12) <= makespan(program) <= 1.25 * bound


def test_of_equally_short_ones_the_one_that_holds_less():
    placement = Placement("loop", 4, 2)
    found, other = build("auto", placement, 7, 7, split=False), build("gpipe", placement, 7)
    assert makespan(found) == makespan(other) == 25.5
    assert (found.schedule, peaks(found), peaks(other)) == ("alternating", [6, 6, 5, 3.5], [7] * 4)


def test_it_says_which_schedule_it_found():
    assert build("auto", Placement("loop", 4, 2), 8).schedule == "zero_bubble"
    assert build("auto", Placement("loop", 4, 2), 8, split=False).schedule == "interleaved_1f1b"
    assert build("auto", Placement("wave", 4, 2), 8, split=False).schedule == "alternating"
    assert build("auto", Placement("loop", 2, 2, BI), 8, split=False).schedule == "backward_first"


# What is asked for is kept.


@settings(max_examples=40, deadline=None)
@given(programs(schedules=["auto"], ranks=4))
def test_the_cap_is_kept_and_the_program_verifies(program):
    assert max(peaks(program)) <= program.max_in_flight
    verify(program)


@settings(max_examples=30, deadline=None)
@given(placements(ranks=4, reuse=3), st.integers(1, 8), st.data())
def test_backwards_are_whole_or_split_on_demand(placement, micro_batches, data):
    costs = data.draw(whole_costs(placement))
    whole, split, either = (build("auto", placement, micro_batches, None, costs, halves)
                            for halves in (False, True, None))
    assert {action.kind for row in whole.compute_rows() for action in row} == {"F", "B"}
    assert {action.kind for row in split.compute_rows() for action in row} - {"B"} == {"F", "I", "W"}
    assert makespan(either, costs) == min(makespan(whole, costs), makespan(split, costs))
    assert either.is_split == (makespan(split, costs) < makespan(whole, costs)), "of equally short ones a whole one"


def test_a_whole_backward_wins_where_only_local_search_makes_it_as_short():
    placement = Placement("wave", 2, 2, "bidirectional")
    costs = Costs(forward=(2, 1, 1, 1), input_grad=(1, ) * 4, weight_grad=(2, ) * 4)
    program = build("auto", placement, 5, None, costs, None)
    assert makespan(program, costs) == 43
    assert not program.is_split


@settings(max_examples=40, deadline=None)
@given(placements(ranks=4, reuse=3), st.integers(1, 8), st.sampled_from([None, False, True]), st.data())
def test_no_named_schedule_within_the_cap_is_shorter(placement, micro_batches, split, data):
    costs = data.draw(whole_costs(placement))
    cap = data.draw(st.sampled_from([1, 1.5, 2, placement.ranks]))
    shortest = makespan(build("auto", placement, micro_batches, cap, costs, split), costs)
    for name in named_for(placement, split):
        for halves in (None, True) if split is None else (split or None, ):
            program = build(name, placement, micro_batches, cap, costs, halves)
            if max(peaks(program)) <= cap:
                assert shortest <= makespan(program, costs), (name, halves)


def named_for(placement, split=None):
    """The named schedules that such a placement and such a wish admit."""
    return [name for name in ORDERS
            if (name != "1f1b" or placement.reuse == 1)
            and (name != "zbv" or (placement.name, placement.reuse) == ("wave", 2))
            and not (ORDERS[name].is_split and split is False)]


@pytest.mark.parametrize("split", [None, False])
def test_an_order_that_the_cap_ties_into_a_circle_is_left_out(split):
    program = build("auto", Placement("loop", 4, 5), 5, 1.75, split=split)
    verify(program)
    assert program.peak <= 1.75


@pytest.mark.parametrize("placement", [Placement("loop", 4, 3), Placement("wave", 3, 2, BI)])
def test_it_is_deterministic(placement):
    costs = unequal(placement, random.Random(1))
    assert build("auto", placement, 7, costs=costs) == build("auto", placement, 7, costs=costs)


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_of_orders_without_bubble_one_that_can_wait_for_messages(micro_batches):
    """No matter how many, they are late at the start and at the end only."""
    placement = Placement("loop", 2, 1, BI)
    program = build("auto", placement, micro_batches, split=False)
    assert makespan(program) == 3 * micro_batches
    assert makespan(program, Costs.uniform(placement, latency=0.1)) == pytest.approx(3 * micro_batches + 0.2)


def test_a_tighter_cap_costs_time():
    placement = Placement("wave", 4, 2)
    programs_by_cap = [build("auto", placement, 8, cap) for cap in (1, 2, 3, 4)]
    assert [max(peaks(program)) for program in programs_by_cap] == [1, 2, 3, 4]
    assert [makespan(program) for program in programs_by_cap] == [50.5, 30.5, 27.5, 25.5]


@pytest.mark.parametrize("split", [None, True, False])
@pytest.mark.parametrize("cap", [0, 0.5, 0.999, -1, float("nan")])
def test_a_cap_below_one_micro_batch_is_refused(split, cap):
    with pytest.raises(ValueError, match=f"max_in_flight {cap:g} is too small: a rank holds at least 1 micro-batch"):
        build("auto", Placement("loop", 2, 2), 4, cap, split=split)


# How good it is.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("ranks", "reuse"), [(2, 2), (2, 4), (4, 2), (4, 4), (8, 2), (8, 4), (16, 2)])
def test_without_latency_it_reaches_the_bound(name, direction, ranks, reuse):
    placement = Placement(name, ranks, reuse, direction)
    costs = Costs.uniform(placement)
    for micro_batches in (ranks, 2 * ranks, 4 * ranks) if ranks < 16 else (2 * ranks, ):
        program = build("auto", placement, micro_batches)
        assert makespan(program) == pytest.approx(lower_bound(placement, micro_batches, costs, split=True), rel=1e-9)
        wait = (ranks - 1 if direction != BI else ranks // 2 - 1) / reuse
        assert makespan(program) == pytest.approx(3 * micro_batches + wait, rel=1e-9)
        assert max(peaks(program)) <= ranks


@pytest.mark.parametrize(("reuse", "direction", "ratio"), [
    (4, "unidirectional", 1.073), (8, "unidirectional", 1.036), (4, BI, 1.031)])
def test_the_bounds_of_eight_ranks_and_eight_micro_batches(reuse, direction, ratio):
    # The table in the design: without a bubble the step would take 1.
    placement = Placement("loop", 8, reuse, direction)
    ideal = ideal_time(placement, 8, Costs.uniform(placement))
    assert round(makespan(build("auto", placement, 8)) / ideal, 3) == ratio


@pytest.mark.parametrize(("ranks", "reuse", "direction", "split"), [
    (2, 2, "unidirectional", 1), (2, 4, "unidirectional", 2), (4, 4, "unidirectional", 8), (4, 2, BI, 4),
    (8, 4, "unidirectional", 16), (8, 4, BI, 16), (8, 8, BI, 16)])
def test_only_stages_whose_splitting_shortens_the_step_are_split(ranks, reuse, direction, split):
    placement = Placement("loop", ranks, reuse, direction)
    program = build("auto", placement, ranks)
    assert program.split_stages == set(range(placement.stages - split, placement.stages))
    assert makespan(program) == pytest.approx(makespan(build("zero_bubble", placement, ranks))), "where all are split"
    whole = {action.stage for row in program.rows for action in row if action.kind == "B"}
    assert whole == set(range(placement.stages - split))


def test_what_splits_fewer_is_improved_where_it_is_as_short():
    placement = Placement("loop", 4, 1, BI)
    costs = Costs.uniform(placement, latency=0.25)
    program = build("auto", placement, 5, costs=costs)
    assert makespan(program, costs) == 18.25
    assert sum(action.kind == "I" for row in program.rows for action in row) == 15, "of 20"


@pytest.mark.parametrize(("direction", "splitting"), [("unidirectional", 0.03), ("unidirectional", 0.1), (BI, 0.03)])
def test_where_halves_take_longer_than_the_whole_fewer_backwards_are_split(direction, splitting):
    placement = Placement("loop", 4, 4, direction)
    costs = Costs.uniform(placement, 1, 1 + splitting, 1 + splitting)
    costs = replace(costs, splitting=splitting)
    program, all_split = (build(name, placement, 8, costs=costs) for name in ("auto", "zero_bubble"))
    assert 0 < len(program.split_stages) < placement.stages
    assert makespan(program, costs) < makespan(all_split, costs) * (1 - splitting / 10)


def unequal(placement, rng):
    """F : I : W from 1 : 0.8 : 0.5 to 1 : 1.3 : 1.5, each stage up to 30 % slower."""
    times = 1, rng.uniform(0.8, 1.3), rng.uniform(0.5, 1.5)
    return Costs(*(tuple(time / placement.reuse * rng.uniform(1, 1.3) for _ in range(placement.stages))
                   for time in times))


def test_with_unequal_stages_it_is_close_to_the_bound_and_never_worse_than_a_named_schedule():
    rng = random.Random(1)
    over_the_bound = []
    for _ in range(32):
        placement = Placement(rng.choice(NAMES), rng.choice([2, 3, 4]), rng.choice([1, 2, 2, 3, 4]),
                              rng.choice(DIRECTIONS))
        micro_batches = placement.ranks * rng.choice([1, 2, 4])
        costs = unequal(placement, rng)
        shortest = makespan(build("auto", placement, micro_batches, costs=costs), costs)
        for name in named_for(placement):
            program = build(name, placement, micro_batches, placement.ranks, costs)
            if max(peaks(program)) <= placement.ranks:
                assert shortest <= makespan(program, costs) * (1 + 1e-9), (name, placement)
        over_the_bound.append(shortest / lower_bound(placement, micro_batches, costs, split=True) - 1)
    assert min(over_the_bound) >= -1e-12
    assert sum(over_the_bound) / len(over_the_bound) < 0.03
    assert max(over_the_bound) < 0.15


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("name", "direction", "reuse"), [
    ("loop", BI, 2), ("loop", BI, 4), ("loop", BI, 8), ("wave", BI, 4), ("wave", "unidirectional", 4)])
def test_where_messages_take_time_it_reaches_the_bound_of_its_cap(name, direction, reuse, ranks):
    placement = Placement(name, ranks, reuse, direction)
    costs = Costs.uniform(placement, latency=0.01)
    for micro_batches in ranks, 2 * ranks:
        bound = lower_bound(placement, micro_batches, costs, split=True, max_in_flight=ranks)
        assert makespan(build("auto", placement, micro_batches, costs=costs), costs) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_no_order_of_eight_ranks_that_holds_five_micro_batches_is_shorter(direction, micro_batches):
    placement = Placement("loop", 8, 4, direction)
    program = build("half_memory", placement, micro_batches)
    assert max(peaks(program)) == 5
    bound = lower_bound(placement, micro_batches, Costs.uniform(placement), split=True, max_in_flight=5)
    assert makespan(program) == pytest.approx(bound, rel=1e-9)


MESSAGES = [("unidirectional", 4), ("unidirectional", 8), ("bidirectional", 2), ("bidirectional", 4)]


@pytest.mark.parametrize(("direction", "reuse"), MESSAGES)
def test_with_messages_that_take_time_another_order_is_shorter_than_without(direction, reuse):
    """On 8 ranks, with a latency of a 13th of an action: the order made for it, and variations of orders."""
    placement = Placement("loop", 8, reuse, direction)
    costs = Costs.uniform(placement, 80, 80, 80, latency=0.6 / reuse * 8)
    naive, found, varied = (simulate(program, costs).makespan for program in (
        build("auto", placement, 8), build("auto", placement, 8, costs=costs),
        build("auto", placement, 8, costs=costs, trials=20)))
    assert varied <= found <= naive
    # With reuse 4 in one direction the order made without latency is a good one, as it splits few backwards.
    assert varied < (1 if (direction, reuse) == ("unidirectional", 4) else 0.99) * naive


def test_variations_are_the_same_every_time_and_keep_the_cap():
    placement = Placement("wave", 3, 2, BI)
    costs = Costs.uniform(placement, latency=0.3)
    first, second = (build("auto", placement, 5, 2, costs, trials=10) for _ in range(2))
    assert first == second
    assert max(peaks(first)) <= 2
    verify(first)


@pytest.mark.parametrize(("name", "placement", "cap"), [
    ("half_memory", Placement("loop", 8, 4), 5), ("third_memory", Placement("loop", 6, 2, BI), 3),
    ("zbv", Placement("wave", 4, 2), 4), ("zero_bubble", Placement("loop", 4, 2), 4),
    ("backward_first", Placement("wave", 4, 2), 4)])
def test_variations_of_a_named_order_are_no_longer_and_keep_its_cap_and_kind(name, placement, cap):
    costs = Costs.uniform(placement, 80, 80, 80, latency=4.0)
    naive = build(name, placement, 8)
    found = build(name, placement, 8, 100, costs, trials=20)
    assert found.schedule == name
    assert found.is_split == naive.is_split
    assert max(peaks(found)) <= cap
    assert makespan(found, costs) < makespan(naive, costs)
    verify(found)
    assert build(name, placement, 8, None, costs, split=True, trials=1).is_split
