"""The simulator's times, on cases computed by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import complete, forward_only
from deepspeed_prt.program.simulator import DeadlockError, Span, simulate

from .common import BI, programs, rows_of

ONE, TWO, BOTH = Placement("loop", 1, 1), Placement("loop", 2, 1), Placement("loop", 2, 1, BI)


def times(timeline):
    """Each rank's spans as text: action, start and end."""
    return [" ".join(f"{span.action}@{span.start:g}-{span.end:g}" for span in row) for row in timeline.spans]


def test_one_rank_has_no_bubble():
    timeline = simulate(build("1f1b", ONE, 3), Costs.uniform(ONE, latency=100))
    assert times(timeline) == ["0F0@0-1 0B0@1-3 0F1@3-4 0B1@4-6 0F2@6-7 0B2@7-9"]
    assert (timeline.makespan, timeline.busy, timeline.bubble_fraction) == (9, 9, 0)
    assert timeline.messages == {}


def test_two_ranks():
    timeline = simulate(build("1f1b", TWO, 2), Costs.uniform(TWO))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0B0@4-6 0B1@7-9",
                               "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7"]
    assert timeline.makespan == 9
    assert timeline.busy == 12
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    assert timeline.messages == {(0, 1): 2, (1, 0): 2}


def test_a_message_arrives_a_latency_after_it_was_sent_and_the_sender_goes_on():
    timeline = simulate(build("1f1b", TWO, 2), Costs.uniform(TWO, latency=0.5))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0B0@5-7 0B1@8-10",
                               "1F0@1.5-2.5 1B0@2.5-4.5 1F1@4.5-5.5 1B1@5.5-7.5"]
    assert timeline.bubble_fraction == pytest.approx(0.4)


def test_unequal_stages():
    timeline = simulate(build("1f1b", TWO, 2), Costs((1, 3), (3, 0), (1, 2)))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0B0@6-10 0B1@11-15",
                               "1F0@1-4 1B0@4-6 1F1@6-9 1B1@9-11"]


def test_messages_of_a_channel_queue_for_its_bandwidth():
    """Three activations leave rank 0 at 1, 2 and 3; each takes 1.5 and arrives 0.5 later: at 3, 4.5 and 6."""
    costs = Costs.uniform(TWO, latency=0.5, transfer=1.5)
    timeline = simulate(build("gpipe", TWO, 3), costs)
    assert [span.start for span in timeline.spans[1] if span.action.kind == "F"] == [3, 4.5, 6]


def test_the_optimizer_step_comes_last():
    without, with_it = (simulate(build("1f1b", TWO, 2), Costs.uniform(TWO, optimizer=time)) for time in (0, 4))
    assert with_it.spans == without.spans
    assert with_it.makespan == without.makespan + 4
    assert with_it.busy == without.busy + 8


def test_turning_points_of_a_wave_cost_no_latency():
    wave = Placement("wave", 2, 2)
    timeline = simulate(build("interleaved_1f1b", wave, 1), Costs.uniform(wave, 2, 2, 2, latency=10))
    assert times(timeline) == ["0F0@0-1 3F0@23-24 3B0@24-26 0B0@50-52",
                               "1F0@11-12 2F0@12-13 2B0@36-38 1B0@38-40"]
    assert timeline.messages == {(0, 1): 2, (1, 0): 2}


def test_evaluation():
    timeline = simulate(forward_only(build("1f1b", TWO, 3)), Costs.uniform(TWO))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0F2@2-3", "1F0@1-2 1F1@2-3 1F2@3-4"]
    assert timeline.messages == {(0, 1): 3}


def test_split_backwards():
    # Rank 0 has each gradient a weight gradient earlier than with whole backwards, and does one where it would wait.
    timeline = simulate(build("zero_bubble", TWO, 2), Costs((1, 1), (2, 2), (3, 3), 0.5))
    assert times(timeline) == ["0F0@0-1 0F1@1-2 0I0@5-7 0W0@7-10 0I1@10-12 0W1@12-15",
                               "1F0@1.5-2.5 1I0@2.5-4.5 1F1@4.5-5.5 1I1@5.5-7.5 1W0@7.5-10.5 1W1@10.5-13.5"]
    assert timeline.messages == {(0, 1): 2, (1, 0): 2}


def test_both_directions():
    timeline = simulate(build("interleaved_1f1b", BOTH, 2), Costs.uniform(BOTH))
    assert times(timeline) == ["0F0@0-1 1F1@1-2 1B1@2-4 0B0@4-6",
                               "0F1@0-1 1F0@1-2 1B0@2-4 0B1@4-6"]
    assert timeline.bubble_fraction == 0
    assert timeline.messages == {(0, 1): 2, (1, 0): 2}, "an activation and a gradient each way"


def test_both_directions_with_a_latency():
    timeline = simulate(build("interleaved_1f1b", BOTH, 3), Costs.uniform(BOTH, latency=0.5))
    assert times(timeline) == ["0F0@0-1 1F1@1.5-2.5 1B1@2.5-4.5 0B0@5-7 0F2@7-8 0B2@12-14",
                               "0F1@0-1 1F0@1.5-2.5 1B0@2.5-4.5 0B1@5-7 1F2@8.5-9.5 1B2@9.5-11.5"]
    assert timeline.messages == {(0, 1): 3, (1, 0): 3}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_spans_carry_the_actions_themselves(schedule):
    program = build(schedule, TWO, 2)
    timeline = simulate(program, Costs.uniform(TWO))
    assert timeline.spans[0][0] == Span(program.rows[0][0], 0, 1)
    assert tuple(tuple(span.action for span in row) for row in timeline.spans) == program.compute_rows()


def test_a_program_without_costs_takes_no_time():
    timeline = simulate(build("1f1b", TWO, 2), Costs((0, 0), (0, 0), (0, 0)))
    assert (timeline.makespan, timeline.bubble_fraction) == (0, 0)


def test_a_cycle_is_an_error():
    cyclic = complete("cyclic", rows_of("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """), TWO, 2, 2)
    with pytest.raises(DeadlockError) as error:
        simulate(cyclic, Costs.uniform(TWO))
    assert "rank 0 for 0RECV_B0" in str(error.value)
    assert "rank 1 for 1RECV_F1" in str(error.value)


def test_a_message_that_is_never_sent_is_an_error():
    good = build("1f1b", TWO, 1)
    broken = replace(good, rows=rows_of("""
        0F0 0RECV_B0 0B0
        1RECV_F0 1F0 1B0 1SEND_B0
    """))
    with pytest.raises(DeadlockError, match="never sent: rank [01] for [01]RECV_[FB]0, rank [01] for"):
        simulate(broken, Costs.uniform(TWO))


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(0, 3))
def test_spans_of_a_rank_do_not_overlap_and_inputs_arrive_in_time(program, latency):
    stages, routes = program.placement.stages, program.placement.routes
    costs = Costs((1, ) * stages, (2, ) * stages, (3, ) * stages, latency)
    timeline = simulate(program, costs)
    span_of = {span.action: span for row in timeline.spans for span in row}
    start_of, end_of = {}, {}
    for (stage, kind, micro_batch), span in span_of.items():
        assert span.end - span.start == {"F": 1, "I": 2, "W": 3, "B": 5}[kind]
        for what in {"F": "F", "I": "I", "W": "W", "B": "IW"}[kind]:
            start_of[stage, what, micro_batch], end_of[stage, what, micro_batch] = span.start, span.end
    for row in timeline.spans:
        assert all(before.end <= after.start for before, after in itertools.pairwise(row))
    for (stage, what, micro_batch), start in start_of.items():
        route = routes[micro_batch % len(routes)]
        before = {"F": stage - 1, "I": stage + 1, "W": -1}[what]
        if 0 <= before < stages:
            hop = latency if route[before] != route[stage] else 0
            assert end_of[before, what, micro_batch] + hop <= start
        if what == "I":
            assert end_of[stage, "F", micro_batch] <= start
        if what == "W" and (stage, "W", micro_batch) in span_of:
            assert end_of[stage, "I", micro_batch] <= start


@settings(max_examples=30, deadline=None)
@given(programs())
def test_latency_never_helps(program):
    stages = program.placement.stages
    makespans = [simulate(program, Costs((1, ) * stages, (1, ) * stages, (1, ) * stages, latency)).makespan
                 for latency in (0, 1, 3)]
    assert makespans == sorted(makespans)
