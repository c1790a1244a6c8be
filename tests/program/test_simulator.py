"""The simulator's times, and the two bounds, on cases computed by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import build, complete, forward_only
from deepspeed_prt.program.simulator import Costs, DeadlockError, Span, ideal_time, lower_bound, simulate

from .common import programs, rows_of

ONE, TWO = Placement("loop", 1, 1), Placement("loop", 2, 1)


def times(timeline):
    """Each rank's spans as text: action, start and end."""
    return [" ".join(f"{span.action}@{span.start:g}-{span.end:g}" for span in row) for row in timeline.spans]


def test_one_rank_has_no_bubble():
    timeline = simulate(build("1f1b", ONE, 3), Costs((1, ), (2, ), latency=100))
    assert times(timeline) == ["0F0@0-1 0B0@1-3 0F1@3-4 0B1@4-6 0F2@6-7 0B2@7-9"]
    assert (timeline.makespan, timeline.busy, timeline.bubble_fraction) == (9, 9, 0)
    assert timeline.messages == {}


def test_two_ranks():
    timeline = simulate(build("1f1b", TWO, 2), Costs((1, 1), (2, 2)))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0B0@4-6 0B1@7-9",
                               "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7"]
    assert timeline.makespan == 9
    assert timeline.busy == 12
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    assert timeline.messages == {(0, 1): 2, (1, 0): 2}


def test_a_message_arrives_a_latency_after_it_was_sent_and_the_sender_goes_on():
    timeline = simulate(build("1f1b", TWO, 2), Costs((1, 1), (2, 2), latency=0.5))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0B0@5-7 0B1@8-10",
                               "1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5.5 1B1@5.5-7.5"]
    assert timeline.bubble_fraction == pytest.approx(0.4)


def test_unequal_stages():
    timeline = simulate(build("1f1b", TWO, 2), Costs((1, 3), (4, 2)))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0B0@6-10 0B1@11-15",
                               "1F0@1-4 1B0@4-6 1F1@6-9 1B1@9-11"]


def test_turning_points_of_a_wave_cost_no_latency():
    wave = Placement("wave", 2, 2)
    timeline = simulate(build("interleaved_1f1b", wave, 1), Costs.uniform(wave, 2, 4, latency=10))
    assert times(timeline) == ["0F0@0-1 3F0@23-24 3B0@24-26 0B0@50-52",
                               "1F0@11-12 2F0@12-13 2B0@36-38 1B0@38-40"]
    assert timeline.messages == {(0, 1): 2, (1, 0): 2}


def test_evaluation():
    timeline = simulate(forward_only(build("1f1b", TWO, 3)), Costs((1, 1), (2, 2)))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0F2@2-3", "1F0@1-2 1F1@2-3 1F2@3-4"]
    assert timeline.messages == {(0, 1): 3}


def test_the_costs_of_a_rank_are_shared_by_its_stages():
    costs = Costs.uniform(Placement("loop", 2, 4), 1, 3, latency=0.25)
    assert costs == Costs((0.25, ) * 8, (0.75, ) * 8, 0.25)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_spans_carry_the_actions_themselves(schedule):
    program = build(schedule, TWO, 2)
    timeline = simulate(program, Costs((1, 1), (2, 2)))
    assert timeline.spans[0][0] == Span(program.rows[0][0], 0, 1)
    assert tuple(tuple(span.action for span in row) for row in timeline.spans) == program.compute_rows()


def test_a_program_without_costs_takes_no_time():
    timeline = simulate(build("1f1b", TWO, 2), Costs((0, 0), (0, 0)))
    assert (timeline.makespan, timeline.bubble_fraction) == (0, 0)


def test_a_cycle_is_an_error():
    cyclic = complete("cyclic", rows_of("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """), TWO, 2, 2)
    with pytest.raises(DeadlockError) as error:
        simulate(cyclic, Costs((1, 1), (2, 2)))
    assert "rank 0 for 0RECV_B0" in str(error.value)
    assert "rank 1 for 1RECV_F1" in str(error.value)


def test_a_message_that_is_never_sent_is_an_error():
    good = build("1f1b", TWO, 1)
    broken = replace(good, rows=rows_of("""
        0F0 0RECV_B0 0B0
        1RECV_F0 1F0 1B0 1SEND_B0
    """))
    with pytest.raises(DeadlockError, match="never sent: rank [01] for [01]RECV_[FB]0, rank [01] for"):
        simulate(broken, Costs((1, 1), (2, 2)))


# (name, ranks, reuse), micro-batches, costs, ideal time, lower bound.
BOUNDS = [
    # One rank: nothing to wait for.
    (("loop", 1, 1), 3, Costs((1, ), (2, )), 9, 9),
    (("loop", 1, 2), 3, Costs((1, 2), (2, 4), latency=7), 27, 27),
    # The last rank waits 1 for its input, works 6, and 2 is left after it; each way costs a latency.
    (("loop", 2, 1), 2, Costs((1, 1), (2, 2)), 6, 9),
    (("loop", 2, 1), 2, Costs((1, 1), (2, 2), latency=0.5), 6, 10),
    # m < p: one micro-batch's way there and back, 4 * 3 and six latencies.
    (("loop", 4, 1), 1, Costs((1, ) * 4, (2, ) * 4), 3, 12),
    (("loop", 4, 1), 1, Costs((1, ) * 4, (2, ) * 4, latency=1), 3, 18),
    # Reuse 2: stages of half the size. The last rank needs 4.5 + 3, but the way there and back is 12 and 14 latencies.
    (("loop", 4, 2), 1, Costs((0.5, ) * 8, (1, ) * 8), 3, 12),
    (("loop", 4, 2), 1, Costs((0.5, ) * 8, (1, ) * 8, latency=1), 3, 26),
    # p = m = 8, 1F1B and reuse 4: 24 + 7 * 3 and 24 + 7 * 3 / 4.
    (("loop", 8, 1), 8, Costs((1, ) * 8, (2, ) * 8), 24, 45),
    (("loop", 8, 4), 8, Costs((0.25, ) * 32, (0.5, ) * 32), 24, 29.25),
    # Unequal stages: a slow last rank has to wait, a slow first one has not.
    (("loop", 2, 1), 2, Costs((1, 5), (2, 1)), 12, 15),
    (("loop", 2, 1), 2, Costs((5, 1), (1, 2)), 12, 12),
    # The middle rank is the slowest: 3 + 3 * 10 + 1 and a latency each way.
    (("loop", 3, 1), 3, Costs((3, 4, 1), (1, 6, 1), latency=2), 30, 38),
    # A wave 0 1 1 0: both ranks work 45; rank 1 waits 1, has 2 left after it, and a latency each way.
    (("wave", 2, 2), 3, Costs((1, 2, 3, 4), (2, 4, 6, 8)), 45, 48),
    (("wave", 2, 2), 3, Costs((1, 2, 3, 4), (2, 4, 6, 8), latency=1), 45, 50),
    # The same with one micro-batch: 30 there and back over two remote boundaries, the turning point is local.
    (("wave", 2, 2), 1, Costs((1, 2, 3, 4), (2, 4, 6, 8), latency=1), 15, 34),
]


@pytest.mark.parametrize(("shape", "micro_batches", "costs", "ideal", "bound"), BOUNDS)
def test_bounds(shape, micro_batches, costs, ideal, bound):
    placement = Placement(*shape)
    assert ideal_time(placement, micro_batches, costs) == ideal
    assert lower_bound(placement, micro_batches, costs) == bound


@settings(max_examples=80, deadline=None)
@given(programs(), st.data())
def test_no_program_beats_the_lower_bound(program, data):
    cost = st.lists(st.integers(1, 9), min_size=program.placement.stages, max_size=program.placement.stages).map(tuple)
    equal = st.integers(1, 9).map(lambda share: (share, ) * program.placement.stages)
    costs = Costs(data.draw(equal | cost), data.draw(equal | cost), data.draw(st.integers(0, 5)))
    timeline = simulate(program, costs)
    bound = lower_bound(program.placement, program.micro_batches, costs)
    ideal = ideal_time(program.placement, program.micro_batches, costs)
    assert timeline.makespan >= bound >= ideal, "whole numbers, so no rounding"
    assert timeline.busy == program.micro_batches * (sum(costs.forward) + sum(costs.backward))
    assert 0 <= timeline.bubble_fraction < 1


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(0, 3))
def test_spans_of_a_rank_do_not_overlap_and_inputs_arrive_in_time(program, latency):
    stages = program.placement.stages
    costs = Costs((1, ) * stages, (2, ) * stages, latency)
    timeline = simulate(program, costs)
    span_of = {span.action: span for row in timeline.spans for span in row}
    route = program.placement.route
    for row in timeline.spans:
        assert all(before.end <= after.start for before, after in itertools.pairwise(row))
    for (stage, kind, micro_batch), span in span_of.items():
        assert span.end - span.start == (1 if kind == "F" else 2)
        before = stage - 1 if kind == "F" else stage + 1
        if 0 <= before < stages:
            hop = latency if route[before] != route[stage] else 0
            assert span_of[before, kind, micro_batch].end + hop <= span.start
        if kind == "B":
            assert span_of[stage, "F", micro_batch].end <= span.start


@settings(max_examples=30, deadline=None)
@given(programs())
def test_latency_never_helps(program):
    stages = program.placement.stages
    makespans = [simulate(program, Costs((1, ) * stages, (2, ) * stages, latency)).makespan for latency in (0, 1, 3)]
    assert makespans == sorted(makespans)
