"""Costs: per stage, and by kind of action."""

import pytest

from deepspeed_prt.program.actions import parse
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement

from .common import BI


def test_the_costs_of_a_rank_are_shared_by_its_stages():
    assert Costs.uniform(Placement("loop", 2, 4), 1, 3, 2, latency=0.25) == Costs(
        (0.25, ) * 8, (0.75, ) * 8, (0.5, ) * 8, 0.25)
    assert Costs.uniform(Placement("wave", 3, 1)) == Costs((1, ) * 3, (1, ) * 3, (1, ) * 3, 0)


def test_two_pipes_have_the_costs_of_one():
    assert Costs.uniform(Placement("loop", 2, 4, BI)) == Costs.uniform(Placement("loop", 2, 4))


def test_a_whole_backward_is_both_halves():
    assert Costs((1, 2), (3, 4), (5, 6)).backward == (8, 10)


def test_halves_may_take_longer_than_the_whole():
    costs = Costs((1, 2), (3, 4), (5, 6), splitting=0.25)
    assert costs.backward == (6.4, 8)
    assert [costs.of(parse(text)) for text in ("1F0", "1I0", "1W0", "1B0")] == [2, 4, 6, 8]
    assert costs.work(1) == 10


@pytest.mark.parametrize(("text", "time"), [("0F7", 1), ("1F7", 2), ("0I7", 3), ("1I7", 4), ("0W7", 5), ("1W7", 6),
                                            ("0B7", 8), ("1B7", 10)])
def test_the_time_of_an_action(text, time):
    assert Costs((1, 2), (3, 4), (5, 6)).of(parse(text)) == time


def test_the_work_of_a_stage():
    assert [Costs((1, 2), (3, 4), (5, 6)).work(stage) for stage in range(2)] == [9, 12]
