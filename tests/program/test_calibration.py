"""Latency from the time of a batch."""

import pytest
from hypothesis import given, strategies as st

from deepspeed_prt.program.build import build
from deepspeed_prt.program.calibration import fit_latency
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
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
