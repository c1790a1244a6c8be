"""Checkpoints: the same layer files as the stock engine's, for every number of ranks and stages."""

import contextlib
import io
import os

import deepspeed
import pytest
import torch

from . import training
from .training import ZERO1, config, merge, weights
from .workers import TaskFailed


def save(path, model, stages, prt, more):
    """Train two steps and save; returns the file names and the weights."""
    engine, *_ = deepspeed.initialize(model=training.build(model, stages), config=config(2, prt=prt, **more))
    iterator = training.data(model, engine)
    for _ in range(2):
        engine.train_batch(iterator)
    engine.save_checkpoint(path, tag="t", client_state={"epoch": 3})
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    return {"files": sorted(os.listdir(os.path.join(path, "t"))), "losses": losses, "weights": {}}


def load(path, model, stages, prt, more, load_optimizer_states=True):
    """Load into a model with other weights and go on as the saver did."""
    module = training.build(model, stages)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt=prt, **more))
    _, client_state = engine.load_checkpoint(path, tag="t", load_optimizer_states=load_optimizer_states)
    loaded = weights(engine)
    iterator = training.data(model, engine)
    for _ in range(2 * 2):
        if iterator is not None:
            next(iterator)
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    return {"losses": losses, "weights": loaded, "epoch": client_state["epoch"], "steps": engine.global_steps}


LOOP, WAVE = {"reuse": 2}, {"reuse": 2, "placement": "wave"}
BOTH_WAYS = {"reuse": 2, "direction": "bidirectional"}
PLANS = pytest.mark.parametrize("prt", [LOOP, WAVE, BOTH_WAYS], ids=["loop", "wave", "bidirectional"])


@pytest.mark.parametrize("model", ["blocks", "tied"])
@PLANS
def test_files_are_those_of_the_stock_engine(world, tmp_path, model, prt):
    stock = world(2).run(save, str(tmp_path / "stock"), model, 2, None, {})
    ours = world(2).run(save, str(tmp_path / "prt"), model, 2, prt, {})
    assert ours[0]["files"] == stock[0]["files"]
    tolerance = 1e-6 if prt is BOTH_WAYS else 0
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], rel=tolerance)
    for name in stock[0]["files"]:
        if name.startswith("layer_"):
            theirs = torch.load(tmp_path / "stock" / "t" / name, weights_only=False)
            mine = torch.load(tmp_path / "prt" / "t" / name, weights_only=False)
            assert theirs.keys() == mine.keys()
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", ["blocks", "tied"])
@pytest.mark.parametrize("more", [{}, ZERO1], ids=["zero0", "zero1"])
@PLANS
def test_the_same_layout_goes_on_exactly(world, tmp_path, model, more, prt):
    saved = world(2).run(save, str(tmp_path), model, 2, prt, more)
    for report, original in zip(world(2).run(load, str(tmp_path), model, 2, prt, more), saved, strict=True):
        assert report["losses"] == original["losses"]
        assert report["epoch"] == 3 and report["steps"] == 4


@pytest.mark.parametrize(("source", "target", "ranks"), [(None, LOOP, 2), (LOOP, None, 2), (LOOP, WAVE, 2),
                                                         (LOOP, LOOP, 3), (None, {"reuse": 3}, 3),
                                                         (BOTH_WAYS, None, 2), (None, BOTH_WAYS, 3),
                                                         (BOTH_WAYS, WAVE, 2), (LOOP, BOTH_WAYS, 2)])
@pytest.mark.parametrize(("model", "more"), [("blocks", {}), ("tied", {}), ("tied", ZERO1)])
def test_module_weights_load_across_layouts(world, tmp_path, model, more, source, target, ranks):
    world(2).run(save, str(tmp_path), model, 2, source, more)
    reference = world(2).run(load, str(tmp_path), model, 2, source, more, load_optimizer_states=False)
    reports = world(ranks).run(load, str(tmp_path), model, ranks, target, more, load_optimizer_states=False)
    expected = merge(reference)
    assert expected.keys() == merge(reports).keys()
    assert all(torch.equal(expected[layer][name], value) for report in reports
               for layer, state in report["weights"].items() for name, value in state.items())
    assert reports[0]["losses"] == pytest.approx(reference[0]["losses"], rel=1e-5)


def test_optimizer_state_of_another_layout_is_refused(world, tmp_path):
    """Never loaded by position."""
    world(2).run(save, str(tmp_path), "blocks", 2, None, {})
    with pytest.raises(AssertionError, match="PRTError: .*load_optimizer_states=False"):
        world(2).run(load, str(tmp_path), "blocks", 2, LOOP, {})


def said_while_saving(path, prt):
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 2), config=config(2, prt=prt))
    engine.train_batch(training.data("blocks", engine))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for tag in ("a", "b"):
            engine.save_checkpoint(path, tag=tag)
    return out.getvalue().count("pass load_optimizer_states=False")


def test_optimizer_state_that_the_stock_engine_would_mistake_is_announced_once(world, tmp_path):
    assert world(2).run(said_while_saving, str(tmp_path), LOOP) == [1, 0]
    assert world(2).run(said_while_saving, str(tmp_path), {"reuse": 1}) == [0, 0]


def save_trainable(path, prt):
    """Case 53; returns the names of what this rank trains."""
    module = training.build("blocks", 2)
    for layer_id, function in zip(range(module._local_start, module._local_stop), module.forward_funcs, strict=True):
        function.linear.bias.requires_grad_(layer_id % 2 == 0)
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt=prt))
    engine.train_batch(training.data("blocks", engine))
    engine.save_checkpoint(path, tag="t", exclude_frozen_parameters=True)
    return [name for name, weight in engine.module.named_parameters() if weight.requires_grad]


def test_frozen_parameters_can_be_left_out(world, tmp_path):
    stock = world(2).reference(save_trainable, str(tmp_path), None)
    names = world(2).run(save_trainable, str(tmp_path), LOOP)
    assert sorted(name for own in names for name in own) == sorted(name for own in stock for name in own)
    for layer_id in range(12):
        state = torch.load(tmp_path / "t" / f"layer_{layer_id:02d}-model_states.pt", weights_only=False)
        assert ("linear.bias" in state) == (layer_id % 2 == 0), layer_id
        assert "linear.weight" in state


def load_broken(path, prt):
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 2), config=config(2, prt=prt))
    engine.load_checkpoint(path, tag="t", load_optimizer_states=False)


@PLANS
def test_a_layer_file_that_cannot_be_read(world, tmp_path, prt):
    """Only one rank reads it, or, in both directions, each."""
    world(2).run(save, str(tmp_path), "blocks", 2, prt, {})
    file = tmp_path / "t" / "layer_00-model_states.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(TaskFailed) as failure:
        world(2).run(load_broken, str(tmp_path), prt)
    names = {rank: name for rank, (name, _) in failure.value.errors.items()}
    assert names.keys() == {0, 1} and "Hang" not in names.values() and names[0] != "RankFailedError"
    assert (names[1] == "RankFailedError") == (prt is not BOTH_WAYS)
