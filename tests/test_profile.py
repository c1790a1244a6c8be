"""Costs measured in a batch, and the order chosen anew from them."""

import contextlib
import copy
import random
import time
from collections.abc import Sequence
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from deepspeed_prt.config import PRTConfig
from deepspeed_prt.errors import RankFailedError
from deepspeed_prt.planning import Planner
from deepspeed_prt.profile import Measurement, Profile, measured_costs
from deepspeed_prt.program.actions import Row
from deepspeed_prt.program.build import build
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.program.simulator import simulate

from . import training
from .training import Block, config
from .workers import TaskFailed


class SlowBlock(Block):
    """A block whose forward takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def plans(ranks: int, ds_config: dict[str, Any], seconds: list[float],
          sizes: Sequence[int] = (4, ) * 8) -> dict[str, Any]:
    """Train batches of one slow block a stage; reports the program of each batch and what was measured.

    ``sizes`` are their numbers of micro-batches.
    """
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(SlowBlock, duration) for duration in seconds], num_stages=ranks,
                            loss_fn=training.mse, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=copy.deepcopy(ds_config))
    iterator = training.data("blocks", engine)
    programs, losses = [], []
    for size in sizes:
        engine.set_train_batch_size(size * training.MICRO_BATCH)
        if ds_config.get("prt"):
            program = engine._train_schedule().program
            programs.append((program.schedule, program.rows))
        losses.append(engine.train_batch(iterator).item())
    return {"programs": programs, "losses": losses, "costs": getattr(engine, "measured_costs", None)}


@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
def test_all_ranks_measure_two_batches_and_go_on_alike(world, direction):
    seconds = [0.0, 0.03, 0.0, 0.0]
    prt = {"reuse": 2, "direction": direction, "split_backward": True}
    first, *others = world(2).run(plans, 2, config(4, prt=prt), seconds)
    for other in others:
        assert other["costs"] == first["costs"]
        assert other["programs"] == first["programs"]
    assert first["programs"][0] == first["programs"][1] == first["programs"][2]
    assert first["programs"][3] == first["programs"][5]
    assert first["programs"][4] == first["programs"][6] == first["programs"][0]
    assert first["programs"][7] in first["programs"][3:5]
    slowest = max(first["costs"].forward)
    assert first["costs"].forward.index(slowest) == 1
    assert 30 <= slowest < 60
    assert max(first["costs"].input_grad) < 30


def failing(ranks: int, ds_config: dict[str, Any]) -> Any:
    from deepspeed_prt import replanning
    measured = replanning.measured_costs

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no costs")

    replanning.measured_costs = fail
    try:
        return plans(ranks, ds_config, [0.0] * 4)
    finally:
        replanning.measured_costs = measured


def failing_once(ranks: int, ds_config: dict[str, Any]) -> tuple[int, bool]:
    """The second batch fails in the middle; batches measured after five, and whether a plan was made."""
    calls = 0

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise ZeroDivisionError("once")
        return training.mse(outputs, labels)

    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Block) for _ in range(4)], num_stages=ranks, loss_fn=loss,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=copy.deepcopy(ds_config))
    iterator = training.data("blocks", engine)
    for batch in range(5):
        with pytest.raises((ZeroDivisionError, RankFailedError)) if batch == 1 else contextlib.nullcontext():
            engine.train_batch(iterator)
    return len(engine._replanning._measured.measurement().batches), engine.measured_costs is not None


def test_a_batch_that_fails_in_the_middle_is_not_one_of_the_measured(world):
    assert world(2).run(failing_once, 2, config(4, prt={"reuse": 2})) == [(2, True)] * 2


def test_one_rank_measures_too(world):
    result, = world(1).run(plans, 1, config(2, prt={"reuse": 2}), [0.0, 0.0])
    assert result["costs"].latency == 0
    assert min(result["costs"].forward) > 0


def test_a_failure_to_plan_is_every_ranks(world):
    with pytest.raises(TaskFailed) as failure:
        world(2).run(failing, 2, config(4, prt={"reuse": 2}))
    assert failure.value.errors[0] == ("ZeroDivisionError", "no costs")
    name, text = failure.value.errors[1]
    assert name == "RankFailedError"
    assert "rank 0 failed while planning with measured costs: ZeroDivisionError: no costs" in text


def test_a_schedule_asked_for_by_name_stays(world):
    result, *_ = world(2).run(plans, 2, config(4, prt={"reuse": 2, "schedule": "breadth_first"}), [0.0, 0.03, 0.0, 0.0])
    assert result["costs"] is not None
    assert {schedule for schedule, _ in result["programs"]} == {"breadth_first"}


def test_of_a_list_scheduler_asked_for_by_name_a_variation_is_tried(world):
    first, second = world(2).run(changing, 2, config(4, prt={"reuse": 4, "schedule": "backward_first"}), [4] * 8,
                                 (4.0, 3.0))
    before, another = first["programs"][2:4]
    assert before != another
    assert first["programs"][4:] == [before, another, before, another]
    assert {schedule for schedule, _ in first["programs"]} == {"backward_first"}
    assert not is_split(another)
    assert second["programs"] == first["programs"]


def test_a_batch_of_another_size_is_planned_with_what_was_measured(world):
    results = world(2).run(resized, 2)
    assert results[0] == results[1]
    assert results[0][0] == "6 micro-batches"


def resized(ranks: int) -> tuple[str, Any]:
    module = training.build("blocks", ranks)
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt={"reuse": 2}))
    iterator = training.data("blocks", engine)
    for _ in range(3):
        engine.train_batch(iterator)
    engine.set_train_batch_size(6 * training.MICRO_BATCH)
    engine.train_batch(iterator)
    program = engine._train_schedule().program
    assert program.rows == build("auto", program.placement, 6, costs=engine.measured_costs).rows
    return f"{program.micro_batches} micro-batches", program.rows


def changing(ranks: int, ds_config: dict[str, Any], sizes: Sequence[int], times: Sequence[float]) -> dict[str, Any]:
    """As :func:`plans`, with measured costs for which another order is shorter, and what all orders then take.

    The latency is 10 for each batch that was measured.
    """
    from deepspeed_prt import replanning
    measured, shortest = replanning.measured_costs, replanning.shortest_batch
    in_turn = iter(times)
    replanning.measured_costs = lambda program, measurements: Costs.uniform(
        program.placement, latency=10.0 * len(measurements[0].batches))
    replanning.shortest_batch = lambda _: next(in_turn)
    try:
        return plans(ranks, ds_config, [0.0] * 8, sizes)
    finally:
        replanning.measured_costs, replanning.shortest_batch = measured, shortest


def is_split(program: tuple[str, Sequence[Row]]) -> bool:
    return any(action.kind == "W" for row in program[1] for action in row)


@pytest.mark.parametrize("times", [(4.0, 3.0), (3.0, 4.0), (3.0, 3.0)])
def test_of_two_orders_the_faster_one_stays_and_no_bit_changes(world, times):
    sizes = [4] * 8
    stock = world(2).run(plans, 2, config(4), [0.0] * 8, sizes)
    ours = world(2).run(changing, 2, config(4, prt={"reuse": 4, "split_backward": True}), sizes, times)
    before, another = programs = ours[0]["programs"][2:4]
    assert before != another
    assert ours[0]["programs"] == [before] * 3 + [another, before] * 2 + [programs[times.index(min(times))]]
    assert ours[1]["programs"] == ours[0]["programs"]
    assert ours[0]["costs"] == ours[1]["costs"]
    assert ours[0]["costs"].latency == 40, "the order before was measured in four batches"
    assert ours[0]["losses"] == stock[0]["losses"]


@pytest.mark.parametrize("times", [(2.0, 3.0, 4.0), (4.0, 2.0, 3.0), (4.0, 3.0, 2.0)])
def test_where_backwards_need_not_be_split_a_whole_one_is_tried_too(world, times):
    sizes = [4] * 10 + [6]
    stock = world(2).run(plans, 2, config(4), [0.0] * 8, sizes)
    ours = world(2).run(changing, 2, config(4, prt={"reuse": 4}), sizes, times)
    before, another, whole = ours[0]["programs"][2:5]
    assert [is_split(program) for program in (before, another, whole)] == [True, True, False]
    fastest = (before, another, whole)[times.index(min(times))]
    assert ours[0]["programs"][:10] == [before] * 3 + [another, whole, before] * 2 + [fastest]
    assert is_split(ours[0]["programs"][10]) == is_split(fastest), "so are batches of other sizes"
    assert ours[1]["programs"] == ours[0]["programs"]
    assert ours[0]["losses"] == stock[0]["losses"]


def resized_meanwhile(ranks: int) -> list[Any]:
    """The programs of batches, one of another size among those in which two orders are tried."""
    from deepspeed_prt import replanning
    measured = replanning.measured_costs
    replanning.measured_costs = lambda program, _: Costs.uniform(program.placement, latency=20.0)
    try:
        engine, *_ = deepspeed.initialize(model=training.build("blocks", ranks),
                                          config=config(4, prt={"reuse": 4, "split_backward": True}))
        iterator = training.data("blocks", engine)
        programs = []
        for micro_batches in (4, 4, 4, 4, 6, 4, 4, 4, 4):
            engine.set_train_batch_size(micro_batches * training.MICRO_BATCH)
            programs.append(engine._train_schedule().program.rows)
            engine.train_batch(iterator)
        return programs
    finally:
        replanning.measured_costs = measured


def test_a_batch_of_another_size_is_no_part_of_the_trial(world):
    first, second = world(2).run(resized_meanwhile, 2)
    assert first == second
    before, another = first[2:4]
    assert before != another
    assert first[4] not in (before, another)
    assert first[5:8] == [before, another, before]
    assert first[8] in (before, another)


def test_an_order_by_name_is_searched_for_other_sizes_too() -> None:
    placement = Placement("loop", ranks=4, reuse=2)
    draw = random.Random(4)
    costs = Costs(*(tuple(draw.uniform(0.7, 1.3) for _ in range(placement.stages)) for _ in range(3)), latency=0.3)
    planner = Planner(PRTConfig(schedule="zero_bubble"), control=None)  # which only orders of the user's need
    planner.placement = placement
    planner.adopt(costs, planner.program(8))
    for micro_batches in range(2, 8):
        found = planner.program(micro_batches)
        as_it_is, for_equal_stages = (build("zero_bubble", placement, micro_batches, costs=assumed)
                                      for assumed in (costs, None))
        assert found.schedule == "zero_bubble" and found.peak <= 4
        assert simulate(found, costs).makespan <= simulate(as_it_is, costs).makespan * (1 + 1e-9)
        assert simulate(found, costs).makespan <= simulate(for_equal_stages, costs).makespan * (1 + 1e-9)


def test_costs_of_a_batch_whose_latency_is_known() -> None:
    placement = Placement("loop", 2, 2)
    program = build("interleaved_1f1b", placement, 4)
    truth = Costs((1.0, 2.0, 3.0, 4.0), (2.0, 2.0, 2.0, 2.0), (0.5, 0.5, 0.5, 1.5), 0.75)
    times = {("F", stage): truth.forward[stage] for stage in range(4)}
    times |= {("I", stage): truth.input_grad[stage] for stage in range(4)}
    times |= {("W", stage): truth.weight_grad[stage] for stage in range(4)}
    makespan = simulate(program, truth).makespan
    measurements = [Measurement({key: time for key, time in times.items() if key[1] % 2 == rank},
                                (2 * makespan, makespan - rank)) for rank in range(2)]
    costs = measured_costs(program, measurements)
    assert costs.forward == truth.forward
    assert costs.input_grad == truth.input_grad
    assert costs.weight_grad == truth.weight_grad
    assert simulate(program, costs).makespan == pytest.approx(makespan, rel=0.01)


def test_of_two_copies_the_mean_counts() -> None:
    placement = Placement("loop", 2, 1, "bidirectional")
    program = build("backward_first", placement, 2)
    measurements = [Measurement({(kind, stage): time for kind in "FIW" for stage in range(2)}, (1.0, ))
                    for time in (1.0, 3.0)]
    assert measured_costs(program, measurements).forward == (2.0, 2.0)


def test_what_is_waited_for_does_not_count() -> None:
    profile = Profile(torch.device("cpu"))
    profile.start_batch()
    for _ in range(3):
        profile.begin("F", 0)
        time.sleep(0.002)
        profile.end()
        time.sleep(0.02)
    profile.begin("I", 0)
    profile.finish_batch()
    times, (batch, ) = profile.measurement()
    assert 2 <= times["F", 0] < 20
    assert times["I", 0] < 2
    assert batch >= 66


def test_a_batch_that_failed_does_not_count() -> None:
    profile = Profile(torch.device("cpu"))
    profile.start_batch()
    profile.begin("F", 0)
    profile.finish_batch()
    profile.start_batch()
    profile.begin("F", 0)
    time.sleep(0.05)
    profile.begin("I", 0)
    profile.forget_batch()
    times, batches = profile.measurement()
    assert times.keys() == {("F", 0)}
    assert times["F", 0] < 25
    assert len(batches) == 1
