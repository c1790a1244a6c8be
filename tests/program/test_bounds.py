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
    # split, it may end with a weight gradient instead, while rank 0 has had its own.
    (("loop", 2, 1), 2, thirds(2), 6, 9, 7),
    (("loop", 2, 1), 2, thirds(2, latency=0.5), 6, 10, 7.5),
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
    # A wave 0 1 1 0: both ranks work 45; rank 1 waits 1, has 2 left after it, and a latency each way.
    (("wave", 2, 2), 3, Costs((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), 45, 48, 46),
    (("wave", 2, 2), 3, Costs((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), latency=1), 45, 50, 47),
    # The same with one micro-batch: 30 there and back over two remote boundaries, the turning point is local; of
    # split ones 10 + 10 and the first stage's weight gradient.
    (("wave", 2, 2), 1, Costs((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), latency=1), 15, 34, 25),
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
    # Four ranks: the middle ones wait 1 and have 2 left, where in one pipe the last one waits 3 and has 6 left. The way
    # there and back of one micro-batch is 12.
    (("loop", 4, 1), 2, thirds(4), 6, 12, 9),
    (("loop", 4, 1), 4, thirds(4), 12, 15, 13),
    (("loop", 4, 1), 4, thirds(4, latency=1), 12, 18, 15),
    # Eight ranks: 24 + 3 * 3 and 24 + 3; with reuse 4 a quarter of the wait.
    (("loop", 8, 1), 8, thirds(8), 24, 33, 27),
    (("loop", 8, 4), 8, Costs.uniform(Placement("loop", 8, 4)), 24, 26.25, 24.75),
    (("wave", 8, 4), 8, Costs.uniform(Placement("wave", 8, 4)), 24, 26.25, 24.75),
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


@settings(max_examples=60, deadline=None)
@given(programs(), st.data())
def test_no_program_beats_the_lower_bound(program, data):
    placement, m = program.placement, program.micro_batches
    costs = data.draw(whole_costs(placement))
    timeline = simulate(program, costs)
    bound = lower_bound(placement, m, costs, program.is_split)
    assert timeline.makespan >= bound >= ideal_time(placement, m, costs), "whole numbers, so no rounding"
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
