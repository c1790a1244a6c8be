"""Costs from the times of batches."""

import pytest
from hypothesis import given, strategies as st

from deepspeed_prt.program.build import build
from deepspeed_prt.program.calibration import costs_of_stages, fit_latency
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.orders.zero_bubble import zero_bubble
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.program import Program, complete
from deepspeed_prt.program.simulator import simulate


@given(ranks=st.integers(2, 4), reuse=st.integers(1, 3), micro_batches=st.integers(1, 6), latency=st.floats(0.01, 9.0))
def test_the_latency_that_a_batch_was_simulated_with(ranks: int, reuse: int, micro_batches: int,
                                                     latency: float) -> None:
    placement = Placement("loop", ranks, reuse)
    program = build("interleaved_1f1b", placement, micro_batches)
    makespan = simulate(program, Costs.uniform(placement, latency=latency)).makespan
    fitted = fit_latency(program, Costs.uniform(placement), makespan)
    assert simulate(program, fitted).makespan == pytest.approx(makespan, rel=0.02)


def test_one_message_after_the_other() -> None:
    """One micro-batch through 2 ranks: F F B B and 2 messages."""
    placement = Placement("loop", 2, 1)
    program = build("1f1b", placement, 1)
    assert fit_latency(program, Costs.uniform(placement), 7.0).latency == pytest.approx(0.5, abs=0.01)


def test_none_where_the_program_takes_longer_without() -> None:
    placement = Placement("loop", 2, 1)
    assert fit_latency(build("1f1b", placement, 4), Costs.uniform(placement), 1.0).latency == 0.0


def test_none_without_messages() -> None:
    placement = Placement("loop", 1, 2)
    assert fit_latency(build("1f1b", Placement("loop", 1, 1), 4), Costs.uniform(placement), 100.0).latency == 0.0


def partly_split(stages: int) -> Program:
    """Of 2 ranks; the first half of the stages keeps its backwards whole."""
    placement = Placement("loop", 2, stages // 2)
    rows = zero_bubble(placement, 2, 2, Costs.uniform(placement), stages // 2)
    return complete("by hand", rows, placement, 2, 2)


def test_what_the_halves_of_whole_backwards_would_take() -> None:
    """Halves take 3 forwards and whole backwards 2.5, so halves take a fifth more; I is two thirds of them."""
    costs = costs_of_stages(partly_split(4), (1.0, 2.0, 1.0, 2.0), (2.5, 5.0, 2.0, 4.0), (0.0, 0.0, 1.0, 2.0))
    assert costs.splitting == pytest.approx(0.2)
    assert costs.input_grad == pytest.approx((2.0, 4.0, 2.0, 4.0))
    assert costs.weight_grad == pytest.approx((1.0, 2.0, 1.0, 2.0))
    assert costs.backward == pytest.approx((2.5, 5.0, 2.5, 5.0)), "what was measured, where it was"


@pytest.mark.parametrize(("stages", "times", "splitting"), [
    (2, [(1, 0), (1, 1)], 0), (4, [(1, 0), (2, 0), (1, 1), (1, 1)], 0), (4, [(2, 0), (2, 0), (1, 1), (5, 5)], 0),
    (4, [(1, 0), (1.8, 0), (1, 1), (1, 1)], 1 / 9), (4, [(2, 0), (1, 0), (1, 1), (1, 1)], 0.25)])
def test_first_and_last_stages_are_no_measure_and_a_lot_is_not_believed(stages: int, times: list[tuple[float, float]],
                                                                       splitting: float) -> None:
    """A first stage whose data need no gradient has half a backward; a last one may have a large head."""
    input_grad, weight_grad = zip(*times, strict=True)
    costs = costs_of_stages(partly_split(stages), [1] * stages, input_grad, weight_grad)
    assert costs.splitting == pytest.approx(splitting)
    assert costs.backward[:stages // 2] == pytest.approx(input_grad[:stages // 2])


def test_one_odd_stage_does_not_make_splitting_costly() -> None:
    costs = costs_of_stages(partly_split(8), (0.1, 1, 1, 1, 1, 1, 1, 9), (9, 2, 2, 2, 1, 1, 1, 1),
                            (0, 0, 0, 0, 1, 1, 1, 1))
    assert costs.splitting == 0


def test_stages_that_take_no_time_say_nothing() -> None:
    costs = costs_of_stages(partly_split(4), (0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0))
    assert costs.splitting == 0
    costs = costs_of_stages(partly_split(4), (1.0, 1.0, 0.0, 0.0), (2.0, 2.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0))
    assert costs.splitting == 0
    assert costs.backward[:2] == pytest.approx((2.0, ) * 2)
    costs = costs_of_stages(partly_split(4), (1, ) * 4, (2, 2, 0, 0), (0, ) * 4)
    assert costs.backward == pytest.approx((2, 2, 0, 0))


@pytest.mark.parametrize("split", [False, True])
def test_where_all_stages_are_alike_there_is_nothing_to_conclude(split: bool) -> None:
    program = build("auto" if not split else "zero_bubble", Placement("loop", 2, 1), 2, split=split)
    assert costs_of_stages(program, [1, 2], [3, 4], [5, 6]) == Costs((1, 2), (3, 4), (5, 6))
