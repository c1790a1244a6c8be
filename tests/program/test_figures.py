"""The figures that schedules are compared by: time, memory, and how evenly the ranks share it."""

import pytest

from deepspeed_prt.program.bounds import ideal_time
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.simulator import simulate

from .common import BI, NAMES, UNI, peaks


def ratio(program):
    """The time of a step by that without any bubble, with F = I = W: a whole backward takes twice a forward."""
    costs = Costs.uniform(program.placement)
    return simulate(program, costs).makespan / ideal_time(program.placement, program.micro_batches, costs)


# Eight ranks, eight micro-batches, whole backwards: 24 without any bubble.
WHOLE = [
    ("1f1b", UNI, 1, 45),
    ("interleaved_1f1b", UNI, 2, 34.5),
    ("interleaved_1f1b", UNI, 4, 29.25),
    ("1f1b", BI, 1, 36),
    ("interleaved_1f1b", BI, 2, 30.5),
    ("interleaved_1f1b", BI, 4, 27.25),
]


@pytest.mark.parametrize(("schedule", "direction", "reuse", "time"), WHOLE)
def test_whole_backwards_in_a_loop(schedule, direction, reuse, time):
    assert ratio(build(schedule, Placement("loop", 8, reuse, direction), 8)) == pytest.approx(time / 24, rel=1e-12)


@pytest.mark.parametrize(("reuse", "limit"), [(1, 1.5), (2, 1.271), (4, 1.136)])
@pytest.mark.parametrize("name", NAMES)
def test_whole_backwards_in_both_directions(name, reuse, limit):
    assert ratio(build("auto", Placement(name, 8, reuse, BI), 8, split=False)) <= limit


# How many of eight micro-batches each of eight ranks holds.
HELD = [
    ("loop", UNI, 1, [8, 7, 6, 5, 4, 3, 2, 1]),
    ("loop", UNI, 4, [8, 7.75, 7.5, 7.25, 7, 6.75, 6.5, 6.25]),
    ("wave", UNI, 4, [6.25, 6.5, 7, 7.25, 7.75, 8, 8, 8]),
    ("loop", BI, 1, [5, 6, 8, 8, 8, 8, 6, 5]),
    ("loop", BI, 2, [6.5, 7, 8, 8, 8, 8, 7, 6.5]),
    ("loop", BI, 4, [7.25, 7.5, 8, 8, 8, 8, 7.5, 7.25]),
    ("wave", BI, 2, [6.5, 7, 8, 8, 8, 8, 7, 6.5]),
]


@pytest.mark.parametrize(("name", "direction", "reuse", "held"), HELD)
def test_what_each_rank_holds(name, direction, reuse, held):
    assert peaks(build("interleaved_1f1b", Placement(name, 8, reuse, direction), 8)) == held


@pytest.mark.parametrize(("name", "direction", "reuse", "limit"), [
    ("loop", UNI, 1, 8),
    ("loop", UNI, 4, 1.5), ("wave", UNI, 4, 1.5),
    ("loop", BI, 2, 1.25), ("wave", BI, 2, 1.25), ("loop", BI, 4, 1.25), ("wave", BI, 4, 1.25),
])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_the_fullest_rank_by_the_emptiest(name, direction, reuse, limit, micro_batches):
    held = peaks(build("interleaved_1f1b", Placement(name, 8, reuse, direction), micro_batches))
    assert max(held) / min(held) <= limit


@pytest.mark.parametrize(("schedule", "held", "time"), [
    ("zbv", 8, 1.0729), ("half_memory", 5, 1.2083), ("third_memory", 3.5, 1.4271)])
def test_time_and_memory_in_a_v(schedule, held, time):
    program = build(schedule, Placement("wave", 8, 2), 16)
    assert peaks(program) == [held] * 8
    assert ratio(program) == pytest.approx(time, abs=1e-4)


def test_1f1b_holds_more_and_takes_longer_than_half_memory_in_a_v():
    plain = build("1f1b", Placement("loop", 8, 1), 16)
    assert max(peaks(plain)) == 8
    assert ratio(plain) == pytest.approx(1 + 7 / 16)
