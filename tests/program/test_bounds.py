"""The two bounds, on cases computed by hand and against every program."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from deepspeed_prt.program.bounds import ideal_time, lower_bound
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.simulator import simulate

from .common import BI, placements, programs, whole_costs


def thirds(stages, latency=0):
    """F = I = W = 1 a stage."""
    return Costs((1, ) * stages, (1, ) * stages, (1, ) * stages, latency)


# (name, ranks, reuse), micro-batches, costs, ideal time, lower bound of whole backwards, lower bound of split ones.
ONE_PIPE = [
    # One rank: nothing to wait for.
    (("loop", 1, 1), 3, thirds(1), 9, 9, 9),
    (("loop", 1, 2), 3, Costs((1, 2), (1, 3), (1, 1), 7), 27, 27, 27),
    # The last rank waits 1 for its input and works 6. After its last backward that of rank 0 is left, which takes 2;
    # split, it may end with a weight gradient instead, while rank 0 has had its own. With messages, that one has done 2
    # of 6 when its first gradient is there, after 4.
    (("loop", 2, 1), 2, thirds(2), 6, 9, 7),
    (("loop", 2, 1), 2, thirds(2, latency=0.5), 6, 10, 8),
    # m < p: one micro-batch's way there and back, 4 * 3 and six latencies; of split ones all weight gradients but the
    # first stage's are off the way.
    (("loop", 4, 1), 1, thirds(4), 3, 12, 9),
    (("loop", 4, 1), 1, thirds(4, latency=1), 3, 18, 15),
    # Reuse 2: stages of half the size. The last rank needs 1.5 + 3 and 3 after it, but the way there and back is more.
    (("loop", 4, 2), 1, Costs.uniform(Placement("loop", 4, 2)), 3, 12, 8.5),
    (("loop", 4, 2), 1, Costs.uniform(Placement("loop", 4, 2), latency=1), 3, 26, 22.5),
    # p = m = 8, 1F1B and reuse 4: 24 + 7 * 3 and 24 + 7 * 3 / 4; split 24 + 7 and 24 + 7 / 4.
    (("loop", 8, 1), 8, thirds(8), 24, 45, 31),
    (("loop", 8, 4), 8, Costs.uniform(Placement("loop", 8, 4)), 24, 29.25, 25.75),
    # Unequal stages: a slow last rank has to wait, a slow first one has not.
    (("loop", 2, 1), 2, Costs((1, 5), (1, 1), (1, 0)), 12, 15, 13),
    (("loop", 2, 1), 2, Costs((5, 1), (1, 1), (0, 1)), 12, 12, 12),
    # The middle rank is the slowest: 3 + 3 * 10 and a latency, and on the way back 1 and a latency.
    (("loop", 3, 1), 3, Costs((3, 4, 1), (1, 5, 1), (0, 1, 0), latency=2), 30, 38, 35),
    # A wave 0 1 1 0: both ranks work 45. Rank 1 waits 1 and works 15 until it may wait for a gradient, which is there
    # after 10 + 8 (split: 10 + 4), and two latencies there and one back; after it 2 are left, and a latency.
    (("wave", 2, 2), 3, Costs((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), 45, 50, 46),
    (("wave", 2, 2), 3, Costs((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), latency=1), 45, 54, 47),
    # The same with one micro-batch: 30 there and back over two remote boundaries, the turning point is local; of
    # split ones rank 1 has 10 left when its gradient is there after 10 + 4 and three latencies.
    (("wave", 2, 2), 1, Costs((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), latency=1), 15, 34, 27),
]
TWO_PIPES = [
    # m = 1: the up pipe is empty, so the bounds are those of one pipe.
    (("loop", 2, 1), 1, thirds(2), 3, 6, 5),
    (("loop", 4, 1), 1, thirds(4), 3, 12, 9),
    # Two ranks, each the first of a pipe: nobody waits.
    (("loop", 2, 1), 2, thirds(2), 6, 6, 6),
    (("loop", 2, 1), 4, thirds(2, latency=1), 12, 12, 12),
    # Of three micro-batches two go down, so that rank 1 has the slow stage 1 twice and stage 0 once.
    (("loop", 2, 1), 3, Costs((1, 5), (1, 1), (1, 0)), 15, 15, 15),
    # Four ranks: the middle ones have done their forwards when a gradient is there after 4 + 2 (split: 4 + 1), have 8
    # left and wait for 2 after it. The way there and back of one micro-batch is 12.
    (("loop", 4, 1), 2, thirds(4), 6, 12, 9),
    (("loop", 4, 1), 4, thirds(4), 12, 16, 13),
    (("loop", 4, 1), 4, thirds(4, latency=1), 12, 21, 17),
    # Eight ranks: 14 + 16 + 6, and 11 + 16; with reuse 4 a quarter of the wait.
    (("loop", 8, 1), 8, thirds(8), 24, 36, 27),
    (("loop", 8, 4), 8, Costs.uniform(Placement("loop", 8, 4)), 24, 27, 24.75),
    (("wave", 8, 4), 8, Costs.uniform(Placement("wave", 8, 4)), 24, 27, 24.75),
    # Three ranks: the middle one, its own mirror, waits as long for either pipe.
    (("loop", 3, 1), 4, thirds(3), 12, 15, 13),
    # Rank 1 has stage 1 down and stage 2 up: it starts with the one that it can start sooner, after 2, works
    # 2 * (2 + 4) and is left with the way back from stage 1, which is shorter than that from stage 2.
    (("loop", 4, 1), 4, Costs((2, 1, 3, 1), (1, 0, 0, 0), (1, 1, 1, 1)), 12, 16, 14),
]


@pytest.mark.parametrize(("shape", "micro_batches", "costs", "ideal", "whole", "split"),
                         [*ONE_PIPE, *((((*shape, BI)), *case) for shape, *case in TWO_PIPES)])
def test_bounds(shape, micro_batches, costs, ideal, whole, split):
    placement = Placement(*shape)
    assert ideal_time(placement, micro_batches, costs) == ideal
    assert lower_bound(placement, micro_batches, costs, split=False) == whole
    assert lower_bound(placement, micro_batches, costs, split=True) == split


@pytest.mark.parametrize(("shape", "micro_batches", "cap", "costs", "whole", "split"), [
    # One micro-batch at a time: each there and back, and of split ones its weight gradient.
    (("loop", 2, 1), 2, 1, thirds(2), 12, 10),
    (("loop", 2, 1), 2, 1, thirds(2, latency=1), 16, 14),
    # Half a micro-batch more is one more stage: rank 0 has done three of its forwards when a gradient is there after
    # 4 + 2 (split: 4 + 1), and 9 are left.
    (("loop", 2, 2), 2, 1.5, thirds(4), 15, 14),
    # Unequal stages: rank 0 does its longer forward twice and the other once until a gradient is there after 10 + 3,
    # and 11 are left.
    (("loop", 2, 2), 2, 1.5, Costs((1, 2, 4, 3), (1, 2, 4, 3), (0, 0, 0, 0)), 24, 24),
    # With three more micro-batches it holds three activations at once, for 20 and 14 each.
    (("loop", 2, 2), 6, 1.5, Costs((1, 2, 4, 3), (1, 2, 4, 3), (0, 0, 0, 0)), 68, 68),
    # Until the first gradient is there after 8 + 7 / 4, the first rank can do 5 of 16 micro-batches.
    (("loop", 8, 4), 16, 5, Costs.uniform(Placement("loop", 8, 4)), 54.5, 52.75),
    # It takes 38 messages as well, and the cap allows 8. Of whole ones the last rank's wait is longer: 7 / 4 and 7
    # messages before 48, 7 / 2 and 7 messages after it.
    (("loop", 8, 4), 16, 8, Costs.uniform(Placement("loop", 8, 4), latency=1 / 64), 53.46875, 50.34375),
    # In both directions the middle ranks wait longest: 8 + 3 / 4 (whole: 3 / 2), for 31 messages there and 3 back.
    (("loop", 8, 4, BI), 16, 8, Costs.uniform(Placement("loop", 8, 4), latency=1 / 64), 51.578125, 49.28125),
    # In a wave, which has no message where it turns three times, the last rank does.
    (("wave", 8, 4), 16, 8, Costs.uniform(Placement("wave", 8, 4), latency=1 / 64), 55.65625, 50.296875),
])
def test_bounds_within_a_cap(shape, micro_batches, cap, costs, whole, split):
    placement = Placement(*shape)
    assert lower_bound(placement, micro_batches, costs, split=False, max_in_flight=cap) == whole
    assert lower_bound(placement, micro_batches, costs, split=True, max_in_flight=cap) == split


@settings(max_examples=100, deadline=None)
@given(programs(), st.data())
def test_no_program_beats_the_lower_bound_of_what_it_holds(program, data):
    placement, m = program.placement, program.micro_batches
    costs = data.draw(whole_costs(placement))
    timeline = simulate(program, costs)
    bound = lower_bound(placement, m, costs, program.is_split)
    within = lower_bound(placement, m, costs, program.is_split, program.peak)
    assert timeline.makespan * (1 + 1e-12) >= within >= bound >= ideal_time(placement, m, costs)
    assert timeline.busy == m * sum(map(costs.work, range(placement.stages)))
    assert 0 <= timeline.bubble_fraction < 1


@settings(max_examples=60, deadline=None)
@given(programs(), st.data(), st.sampled_from([1, 3]))
def test_no_program_beats_the_bound_where_halves_take_longer_than_the_whole(program, data, splitting):
    costs = replace(data.draw(whole_costs(program.placement)), splitting=splitting)
    bound = lower_bound(program.placement, program.micro_batches, costs, program.is_split)
    assert simulate(program, costs).makespan >= bound, "halves and quarters, so no rounding"


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(1, 9), st.data())
def test_splitting_and_less_latency_never_raise_a_bound(placement, micro_batches, data):
    costs = data.draw(whole_costs(placement))
    split, whole = (lower_bound(placement, micro_batches, costs, split) for split in (True, False))
    assert split <= whole
    at_once = Costs(costs.forward, costs.input_grad, costs.weight_grad)
    assert lower_bound(placement, micro_batches, at_once, split=True) <= split
    assert lower_bound(placement, micro_batches, at_once, split=False) <= whole
