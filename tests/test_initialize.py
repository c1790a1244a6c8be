"""deepspeed.initialize with the section: what takes effect, what is refused, on every rank."""

import contextlib
import io
import re
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from deepspeed_prt import PRTPipelineModule, refusals
from deepspeed_prt.config import PRTConfig
from deepspeed_prt.errors import PRTConfigError

from . import training
from .training import Block, assert_same, blocks, config, mse, weights
from .workers import TaskFailed


def initialize(ds_config, kind="pipeline", **arguments):
    torch.manual_seed(1)
    model = {
        "pipeline": lambda: training.build("blocks", torch.distributed.get_world_size()),
        "dualpipev": lambda: DualPipeVModule(blocks(8), num_stages=2, loss_fn=mse),
        "plain": lambda: Block(),
        "alternating": lambda: PipelineModule([LayerSpec(Block), nn.Tanh(), LayerSpec(Block), nn.Tanh()], num_stages=2,
                                              loss_fn=mse, partition_method="uniform"),
        "prt": lambda: PRTPipelineModule(blocks(12), num_stages=2, loss_fn=mse, seed_layers=True,
                                         partition_method="uniform", reuse=3),
        "prt_wave": lambda: PRTPipelineModule(blocks(12), num_stages=2, loss_fn=mse, seed_layers=True,
                                              partition_method="uniform", reuse=2, placement="wave"),
    }[kind]()
    engine, *_ = deepspeed.initialize(model=model, config=ds_config, **{k: v(model) for k, v in arguments.items()})
    return engine, model


def class_name(*args, **kwargs):
    return type(initialize(*args, **kwargs)[0]).__name__


@pytest.mark.parametrize(("prt", "expected"), [(None, "PipelineEngine"), ({"enabled": False}, "PipelineEngine"),
                                               ({}, "PRTPipelineEngine")])
def test_the_section_decides(world, prt, expected):
    assert world(2).run(class_name, config(prt=prt)) == [expected] * 2


def used_optimizer(module):
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if module.stage_id == 1:
        optimizer.step()
    return optimizer


REFUSED = [
    ("pipeline", config(prt={"reus": 2}), "unknown key"),
    ("pipeline", config(prt={"reuse": 7}), r"12 layers cannot fill 2 ranks x 7 stages = 14 stages; use reuse <= 6"),
    ("pipeline", config(prt={"partition": [0, 4, 8, 11, 12], "reuse": 3}), "make 4 stages, but 2 ranks x 3 stages"),
    ("pipeline", config(prt={"partition": [0, 4, 8, 11]}), "make 3 stages"),
    ("pipeline", config(prt={"partition": [0, 4, 8, 11, 13]}), "must rise from 0 to 12"),
    ("pipeline", config(prt={"partition": "type:("}), r'"partition": .type:\(. cannot cut 12 layers'),
    ("pipeline", config(prt={"partition": "type:Nope"}), "cannot cut 12 layers .* no valid layers"),
    ("pipeline", config(prt={"schedule": "1f1b", "reuse": 2}), "one stage per rank"),
    ("pipeline", config(gas=8, prt={"schedule": "gpipe", "max_in_flight": 2}), "more than max_in_flight 2"),
    ("pipeline", config(prt={"max_in_flight": 0.5}), "too small"),
    ("pipeline", config(prt={"schedule": "no.such:thing"}), "cannot be loaded"),
    ("pipeline", config(prt={"schedule": "os:getcwd"}), "failed with TypeError: .*takes no arguments"),
    ("pipeline", config(prt={}, zero_optimization={"stage": 2}), "ZeRO-2 is incompatible"),
    ("dualpipev", config(prt={}), "cannot take effect on a DualPipeVModule"),
    ("plain", config(prt={}, dp=2), "cannot take effect on a Block"),
    ("prt", config(prt={"reuse": 2}), "\"reuse\": 2, but the PRTPipelineModule was built with 3"),
    ("prt", config(prt={"partition": [0, 2, 4, 6, 8, 10, 12]}), "comes too late for a PRTPipelineModule"),
    ("prt", config(prt={"direction": "bidirectional"}), "built with 'unidirectional'"),
    ("prt_wave", config(prt={"placement": "loop"}), "'loop', but the PRTPipelineModule was built with 'wave'"),
    ("alternating", config(prt={"reuse": 2}, bf16={"enabled": True}), r"rank 1 would hold layers \[1, 3\]"),
    ("alternating", config(prt={"reuse": 2}, zero_optimization={"stage": 1}), r"rank 1 would hold layers \[1, 3\]"),
]


@pytest.mark.parametrize(("kind", "ds_config", "message"), REFUSED)
def test_refused_on_every_rank(world, kind, ds_config, message):
    with pytest.raises(TaskFailed) as failure:
        world(2).run(class_name, ds_config, kind)
    assert sorted(failure.value.errors) == [0, 1]
    for name, text in failure.value.errors.values():
        assert name == "PRTConfigError" and re.search(message, text), text


def test_one_queue_for_all_streams_of_a_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    module = SimpleNamespace(mpu=lambda: SimpleNamespace(get_slice_parallel_world_size=lambda: 1))
    plain = SimpleNamespace(zero_optimization_stage=0)
    refusals.refuse_unsupported(PRTConfig(), plain, module)
    monkeypatch.setattr(refusals, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    with pytest.raises(PRTConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        refusals.refuse_unsupported(PRTConfig(), plain, module)


def test_an_optimizer_with_state_is_refused_though_only_one_rank_has_it(world):
    with pytest.raises(TaskFailed) as failure:
        world(2).run(class_name, config(prt={"reuse": 2}), optimizer=used_optimizer)
    errors = failure.value.errors
    assert re.search(r"already has state .* like lambda parameters: Adam\(parameters\)", errors[1][1]), errors[1][1]
    assert errors[0][0] == "RankFailedError" and "rank 1 failed while looking at the layers" in errors[0][1]


def initialized_twice(first, second):
    module = PipelineModule(blocks(12), num_stages=2, loss_fn=mse, partition_method="uniform")
    for section in (first, second):
        engine, *_ = deepspeed.initialize(model=module, config=config(prt=section))
    return engine.train_batch(training.data("blocks", engine)).item()


def test_a_second_engine_of_the_same_module(world):
    """What cut the module may stand in the config again, but nothing else."""
    uniform = {"reuse": 2, "partition": "uniform"}
    assert len(set(world(2).run(initialized_twice, uniform, uniform))) == 1
    with pytest.raises(TaskFailed, match=r"comes too late .* \(by an earlier deepspeed.initialize"):
        world(2).run(initialized_twice, uniform, {"reuse": 2, "partition": "parameters"})


class Own(PipelineEngine):
    """Somebody's own engine."""


def own_engine(prt):
    module = training.build("blocks", 2)
    ds_config = config(prt=prt)
    config_class = deepspeed.DeepSpeedConfig(ds_config, module.mpu())
    return type(Own(args=None, model=module, config=ds_config, config_class=config_class, mpu=module.mpu())).__name__


def test_another_engine_is_an_error_not_silence(world):
    assert world(2).run(own_engine, None) == ["Own"] * 2
    with pytest.raises(TaskFailed, match="cannot take effect in a Own"):
        world(2).run(own_engine, {})


def references():
    """The user's references stay good; no random number is drawn; rank 0 says what was built."""
    module = training.build("blocks", 2)
    old = {id(parameter) for parameter in module.parameters()}
    torch.manual_seed(9)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        engine, *_ = deepspeed.initialize(model=module, config=config(prt={"reuse": 2}))
    drawn = torch.rand(1).item()
    assert engine.module is module and type(module) is not PipelineModule and isinstance(module, PRTPipelineModule)
    return {
        "kept": sum(id(parameter) in old for parameter in module.parameters()),
        "drawn": drawn,
        "said": [line for line in output.getvalue().splitlines() if line.startswith("deepspeed_prt: ")],
        "ends": (engine.is_first_stage(), engine.is_last_stage()),
        "layers": module.layer_ids,
    }


def test_references_random_numbers_and_the_log(world):
    reports = world(2).run(references)
    torch.manual_seed(9)
    expected = torch.rand(1).item()
    assert [report["layers"] for report in reports] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert [report["kept"] for report in reports] == [6, 6]
    assert [report["drawn"] for report in reports] == [expected] * 2
    assert [report["ends"] for report in reports] == [(True, False), (False, True)]
    assert reports[0]["said"] == [
        "deepspeed_prt: 2 ranks x 2 stages = 4 stages in a loop, schedule zero_bubble, 4 micro-batches, "
        "predicted bubble 4.0 %, at most 2 micro-batches in flight per rank"]
    assert reports[1]["said"] == []


def direct(prt, kind):
    """A PRTPipelineModule built directly, without a section or with one that agrees."""
    engine, module = initialize(config(3, prt=prt), kind)
    assert type(engine).__name__ == "PRTPipelineEngine"
    iterator = training.data("blocks", engine)
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": weights(engine)}


@pytest.mark.parametrize(("prt", "kind"), [(None, "prt"), ({}, "prt"), ({"reuse": 3}, "prt"), (None, "prt_wave"),
                                           ({}, "prt_wave"), ({"placement": "wave"}, "prt_wave")])
def test_a_module_built_directly(world, prt, kind):
    stock = world(2).run(training.train, "blocks", 2, config(3), steps=3)
    assert_same(stock, world(2).run(direct, prt, kind))


def auto_reuse(layers, method, stages):
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(layers)], num_stages=stages, loss_fn=mse,
                            partition_method=method)
    engine, *_ = deepspeed.initialize(model=module, config=config(prt={"reuse": "auto"}))
    return engine.placement.reuse


@pytest.mark.parametrize(("layers", "expected"), [(2, 1), (3, 1), (4, 2), (7, 3), (12, 6)])
@pytest.mark.parametrize("method", ["uniform", "parameters", "type:Linear"])
def test_auto_reuse_fills_balanced_ranks(world, layers, method, expected):
    assert world(2).run(auto_reuse, layers, method, 2) == [expected] * 2


def custom_order(placement, micro_batches, max_in_flight):
    """A schedule of the user's, in strings: one micro-batch after the other."""
    return [[f"{stage}{kind}{micro_batch}" for micro_batch in range(micro_batches)
             for kind, stages in (("F", placement.stages_of(rank)), ("B", reversed(placement.stages_of(rank))))
             for stage in stages] for rank in range(placement.ranks)]


def test_schedules_of_ones_own(world, tmp_path):
    from deepspeed_prt.program.build import build
    from deepspeed_prt.program.csv_format import to_csv
    from deepspeed_prt.program.placement import Placement
    path = tmp_path / "program.csv"
    to_csv(build("breadth_first", Placement("loop", 2, 2), 3), path)
    stock = world(2).run(training.train, "blocks", 2, config(3), steps=3)
    for schedule, cap in (("tests.test_initialize:custom_order", None), (str(path), 3)):
        prt = {"reuse": 2, "schedule": schedule, "max_in_flight": cap}
        assert_same(stock, world(2).run(training.train, "blocks", 2, config(3, prt=prt), steps=3))
