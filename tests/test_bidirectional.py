"""Both directions against the stock engine, and the two copies of each stage against each other."""

import copy
import sys
import weakref
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from deepspeed_prt import PRTPipelineModule, channels, replicas

from . import training
from .training import BF16, WIDTH, Block, assert_same, blocks, config, mse, vectors, weights
from .workers import TaskFailed

LOOP1, LOOP2 = {"direction": "bidirectional", "reuse": 1}, {"direction": "bidirectional", "reuse": 2}
WAVE1, WAVE2 = ({**prt, "placement": "wave"} for prt in (LOOP1, LOOP2))
PLANS = pytest.mark.parametrize("prt", [LOOP2, WAVE2], ids=["loop", "wave"])


def watched(model, stages, ds_config, steps=5, evaluate_after=None, **module_kwargs):
    """Train, and report all of this rank's weights after every step."""
    module = training.build(model, stages, **module_kwargs)
    engine, *_ = deepspeed.initialize(model=module, config=copy.deepcopy(ds_config))
    iterator = training.data(model, engine)
    losses, states = [], []
    for step in range(steps):
        losses.append(engine.train_batch(iterator).item())
        states.append(weights(engine))
        training.clean(engine)
        if step == evaluate_after:
            losses.append(engine.eval_batch(training.data(model, engine)).item())
    norm = engine.get_global_grad_norm()
    return {"losses": losses, "states": states, "weights": states[-1], "norm": None if norm is None else float(norm)}


def assert_copies_are_equal(reports):
    """After every step the copies of each layer agree bit for bit, and each layer has as many as it should."""
    for step in range(len(reports[0]["states"])):
        seen = {}
        for report in reports:
            for layer, state in report["states"][step].items():
                for name, value in state.items():
                    other = seen.setdefault((layer, name), value)
                    assert torch.equal(value, other), f"step {step}, layer {layer}, {name}"


@pytest.mark.parametrize("gas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("prt", [LOOP1, LOOP2, WAVE1, WAVE2], ids=["loop1", "loop2", "wave1", "wave2"])
def test_losses_and_weights(world, prt, ranks, gas):
    stock = world(ranks).reference(training.train, "blocks", ranks, config(gas))
    ours = world(ranks).run(watched, "blocks", ranks, config(gas, prt=prt))
    assert_same(stock, ours, tolerance=1e-6)
    assert_copies_are_equal(ours)
    for rank, report in enumerate(ours):
        assert report["weights"].keys() == ours[ranks - 1 - rank]["weights"].keys()


def in_small_buckets(*args, **kwargs):
    """As :func:`watched`, with a sum for every stage, of at most 30 elements unless one weight has more."""
    replicas.SMALL, before = 1, replicas.SMALL
    try:
        more = {"zero_optimization": {"stage": 0, "reduce_bucket_size": 30}}
        return watched(*args[:2], {**args[2], **more}, **kwargs)
    finally:
        replicas.SMALL = before


@PLANS
@pytest.mark.parametrize("model", ["blocks", "tied"])
def test_sums_in_small_buckets(world, prt, model):
    together = world(2).run(watched, model, 2, config(3, prt=prt))
    apart = world(2).run(in_small_buckets, model, 2, config(3, prt=prt))
    assert_same(together, apart)
    assert_copies_are_equal(apart)


@PLANS
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("gas", [1, 3])
def test_tied_embedding(world, prt, ranks, gas):
    stock = world(ranks).reference(training.train, "tied", ranks, config(gas))
    ours = world(ranks).run(watched, "tied", ranks, config(gas, prt=prt))
    assert_same(stock, ours, tolerance=1e-6)
    assert_copies_are_equal(ours)


PRECISIONS = {
    "fp32": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16_zero1_fp32_grads": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                              "data_types": {"grad_accum_dtype": "fp32"}},
}


@PLANS
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", ["blocks", "tied"])
def test_data_parallel_precisions_and_clipping_that_bites(world, prt, precision, model):
    more = {"gradient_clipping": 0.05, **PRECISIONS[precision]}
    stock = world(4).reference(training.train, model, 2, config(3, dp=2, **more), steps=3)
    ours = world(4).run(watched, model, 2, config(3, dp=2, prt=prt, **more), steps=3)
    is_bf16 = "bf16" in precision
    assert_same(stock, ours, tolerance=2e-2 if is_bf16 else 1e-6)
    assert_copies_are_equal(ours)
    if stock[0]["norm"] is not None:
        for theirs, mine in zip(stock, ours, strict=True):
            assert mine["norm"] == pytest.approx(float(theirs["norm"]), rel=1e-2 if is_bf16 else 1e-5)


@PLANS
@pytest.mark.parametrize("interval", [0, 1])
def test_dropout_under_seed_layers_with_an_evaluation_in_between(world, prt, interval):
    more = {"seed_layers": True, "activation_checkpoint_interval": interval, "evaluate_after": 1}
    stock = world(2).reference(training.train, "dropout", 2, config(3), **more)
    assert_same(stock, world(2).run(watched, "dropout", 2, config(3, prt=prt), **more), tolerance=1e-6)


@PLANS
@pytest.mark.parametrize("model", ["blocks", "tied"])
def test_a_split_backward(world, prt, model):
    whole = world(2).run(watched, model, 2, config(4, prt={**prt, "split_backward": False, "schedule": "gpipe"}))
    split = world(2).run(watched, model, 2, config(4, prt={**prt, "split_backward": True, "schedule": "gpipe"}))
    assert_same(whole, split)
    assert_copies_are_equal(split)


def built_directly(prt, seed_layers):
    """Every rank draws the weights of its copies for itself; the down pipe's count."""
    torch.manual_seed(7 + torch.distributed.get_rank())
    module = PRTPipelineModule(blocks(8), num_stages=2, loss_fn=mse, seed_layers=seed_layers,
                               partition_method="uniform", reuse=prt["reuse"], placement=prt.get("placement", "loop"),
                               direction="bidirectional")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt={}))
    losses = [engine.train_batch(training.data("blocks", engine)).item() for _ in range(2)]
    return {"losses": losses, "states": [weights(engine)]}


@PLANS
@pytest.mark.parametrize("seed_layers", [True, False])
def test_copies_of_a_module_built_directly_start_equal(world, prt, seed_layers):
    reports = world(2).run(built_directly, prt, seed_layers)
    assert_copies_are_equal(reports)
    assert reports[0]["losses"] == reports[1]["losses"]


class Sometimes(nn.Module):
    """Uses its second layer only for the second micro-batch, and its third one never."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if x.sum() > 0 else x


def sometimes(prt, stages, dp):
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Sometimes) for _ in range(8)], num_stages=stages, loss_fn=mse, seed_layers=True,
                            partition_method="uniform")
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=module, config=config(3, dp=dp, prt=prt, optimizer=optimizer))
    iterator = vectors(5 + engine.grid.get_data_parallel_id())
    losses = [engine.train_batch(iterator if engine.is_first_stage() or engine.is_last_stage() else None).item()
              for _ in range(3)]
    return {"losses": losses, "weights": weights(engine), "states": [weights(engine)]}


@PLANS
@pytest.mark.parametrize("dp", [1, 2])
def test_weights_that_not_every_micro_batch_uses(world, prt, dp):
    """One that none uses has no gradient, and so no weight decay, as with the stock engine."""
    stock = world(2 * dp).reference(sometimes, None, 2, dp)
    ours = world(2 * dp).run(sometimes, prt, 2, dp)
    assert_same(stock, ours, tolerance=1e-5)
    assert_copies_are_equal(ours)


class Norm(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.linear(x))


def norms(prt, gas, steps):
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Norm) for _ in range(4)], num_stages=2, loss_fn=mse, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(gas, prt=prt))
    losses = [engine.train_batch(vectors(5)).item() for _ in range(steps)]
    return {"losses": losses, "weights": weights(engine), "states": [weights(engine)]}


@pytest.mark.parametrize("gas", [1, 2, 3])
def test_running_statistics_of_batch_norms(world, gas):
    stock, ours = world(2).reference(norms, None, gas, 2), world(2).run(norms, LOOP2, gas, 2)
    assert_copies_are_equal(ours)
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], rel=1e-5)
    if gas == 1:
        assert_same(stock, ours, tolerance=1e-6)
    for layer, state in training.merge(stock).items():
        mine = training.merge(ours)[layer]
        assert mine["norm.num_batches_tracked"] == state["norm.num_batches_tracked"] == 2 * gas
        # Of two micro-batches the later one counts a little more in one pipe, but not where they come in two.
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.allclose(mine[name], state[name], atol=0.02)


def norms_of_equal_micro_batches(prt, momentum, frozen):
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Norm) for _ in range(4)], num_stages=2, loss_fn=mse, seed_layers=True,
                            partition_method="uniform")
    for layer in module.forward_funcs:
        layer.norm.momentum = momentum
        layer.norm.training = not frozen
    engine, *_ = deepspeed.initialize(model=module, config=config(5, prt=prt))
    engine.module.train = lambda mode=True: engine.module
    batch = next(vectors(5))
    losses = [engine.train_batch(iter([batch] * 5)).item() for _ in range(3)]
    return {"losses": losses, "weights": weights(engine), "states": [weights(engine)]}


@pytest.mark.parametrize(("momentum", "frozen"), [(0.1, False), (0.9, False), (None, False), (0.0, False), (0.1, True)])
def test_running_statistics_forget_as_fast_as_in_one_pipe(world, momentum, frozen):
    stock = world(2).reference(norms_of_equal_micro_batches, None, momentum, frozen)
    ours = world(2).run(norms_of_equal_micro_batches, LOOP2, momentum, frozen)
    assert_copies_are_equal(ours)
    assert_same(stock, ours, tolerance=1e-5)


def norms_after_a_failure(prt):
    """Five batches, of which the second fails at the loss, when the two pipes have come to different places."""
    calls = []

    def loss(outputs, labels):
        calls.append(outputs)
        if len(calls) == 5 and torch.distributed.get_rank() == 0:
            raise RuntimeError("boom")
        return mse(outputs, labels)

    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Norm) for _ in range(4)], num_stages=2, loss_fn=loss, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(6, prt=prt))
    states, failures = [], 0
    for seed in range(5):
        try:
            engine.train_batch(vectors(seed))
        except RuntimeError:
            failures += 1
        states.append(weights(engine))
    return {"states": states, "failures": failures}


def test_statistics_of_batch_norms_stay_equal_after_a_batch_that_failed(world):
    reports = world(2).run(norms_after_a_failure, LOOP2)
    assert [report["failures"] for report in reports] == [1, 1]
    assert_copies_are_equal(reports)
    for report in reports:
        for layer, state in report["states"][1].items():
            for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
                assert torch.equal(state[name], report["states"][0][layer][name]), "as if that batch had not been"


class Fails(nn.Module):
    """Fails in the forward or the backward, on one call, on one rank."""

    armed = None

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if Fails.armed == "forward":
            Fails.armed = None
            raise RuntimeError("boom")
        y = self.linear(x)
        if Fails.armed == "backward" and y.requires_grad:
            y.register_hook(self.explode)
        return y

    @staticmethod
    def explode(grad):
        if Fails.armed == "backward":
            Fails.armed = None
            raise RuntimeError("boom")


def failing(prt, when, failing_rank, more):
    """One rank fails in a batch; then training goes on as if that batch had not been."""
    def batches(seed):
        return vectors(seed) if not more else ((x.bfloat16(), y.bfloat16()) for x, y in vectors(seed))

    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Fails) if index in (1, 4) else LayerSpec(Block) for index in range(8)],
                            num_stages=2, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt, **more))
    losses = [engine.train_batch(batches(1)).item()]
    before = weights(engine)
    Fails.armed = when if torch.distributed.get_rank() == failing_rank else None
    error = None
    try:
        engine.train_batch(batches(2))
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    after = weights(engine)
    unchanged = all(torch.equal(before[layer][name], after[layer][name]) for layer in before for name in before[layer])
    training.clean(engine)
    losses.append(engine.train_batch(batches(3)).item())
    return {"losses": losses, "error": error, "unchanged": unchanged, "states": [weights(engine)]}


@PLANS
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize(("split", "more"), [(True, {}), (False, {}), (False, BF16)], ids=["split", "whole", "bf16"])
def test_a_rank_that_fails_inside_a_batch(world, prt, when, failing_rank, split, more):
    reports = world(2).run(failing, {**prt, "split_backward": split}, when, failing_rank, more)
    assert reports[failing_rank]["error"] == "RuntimeError: boom"
    assert f"rank {failing_rank} failed while computing" in reports[1 - failing_rank]["error"]
    assert all(report["unchanged"] for report in reports)
    assert reports[0]["losses"] == reports[1]["losses"]
    assert_copies_are_equal(reports)


class RunsOutOfMemory(nn.Module):
    """Fails for lack of memory while it holds a tensor."""

    held = None

    def forward(self, x):
        large = torch.zeros(1000)
        RunsOutOfMemory.held = weakref.ref(large)
        raise torch.OutOfMemoryError("no room")


def out_of_memory(prt):
    """Whether the pass that failed still holds its tensors when others need memory."""
    module = PipelineModule([LayerSpec(Block), LayerSpec(Block), LayerSpec(RunsOutOfMemory), LayerSpec(Block)],
                            num_stages=2, loss_fn=mse, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt=prt))
    held = []
    finish = engine._finish_without_computing

    def finish_and_look(instruction):
        held.append(RunsOutOfMemory.held is not None and RunsOutOfMemory.held() is not None)
        finish(instruction)

    engine._finish_without_computing = finish_and_look
    with pytest.raises(RuntimeError, match="no room"):
        engine.train_batch(vectors(1))
    return held


def test_a_pass_that_lacks_memory_lets_go_of_what_it_has(world):
    reports = world(2).run(out_of_memory, {"reuse": 2, "direction": "unidirectional"})
    assert reports[0] and not any(map(any, reports))


class TwoTensors(nn.Module):
    """A block that takes a tensor or two, and returns two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x, y = x if isinstance(x, tuple) else (x, x)
        return torch.tanh(self.linear(x)), x + y


def no_room_for_messages(prt, failing_rank):
    """Memory lacks for one tensor of the channels, in each batch for a later one."""
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(TwoTensors) for _ in range(8)], num_stages=2, seed_layers=True,
                            loss_fn=lambda outputs, labels: mse(outputs[0] + outputs[1], labels),
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt))
    room, make = [], torch.empty

    def empty(*args, **kwargs):
        if sys._getframe(1).f_globals["__name__"] == channels.__name__ and room:
            room[0] -= 1
            if room[0] < 0:
                room.clear()
                raise torch.OutOfMemoryError("no room")
        return make(*args, **kwargs)

    outcomes = []
    with mock.patch.object(torch, "empty", empty):
        for tensors in range(0, 40, 3):
            if torch.distributed.get_rank() == failing_rank:
                room[:] = [tensors]
            try:
                engine.train_batch(vectors(2))
                outcomes.append("trained")
            except RuntimeError as error:
                outcomes.append(type(error).__name__)
            if outcomes[-1] == "trained":  # with fewer than that
                break
        room.clear()
    return outcomes, engine.train_batch(vectors(3)).item()


@PLANS
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_lacks_memory_for_a_message(world, prt, failing_rank):
    reports = world(2).run(no_room_for_messages, {**prt, "split_backward": False}, failing_rank)
    own, other = reports[failing_rank][0], reports[1 - failing_rank][0]
    assert len(own) > 3 and set(own[:-1]) == {"OutOfMemoryError"}
    assert set(other[:-1]) == {"RankFailedError"}
    assert reports[0][1] == reports[1][1]


def evaluated(prt):
    """Losses of every micro-batch and the last one's logits arrive on the last rank."""
    module = training.build("blocks", 2)
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    each = engine.eval_batch(vectors(4), reduce_output=None, bcast_loss=False, num_micro_batches=5)
    mean, logits = engine.eval_batch(vectors(4), return_logits=True)
    return (None if each is None else [loss.item() for loss in each]), mean.item(), logits


@pytest.mark.parametrize("prt", [LOOP1, LOOP2, WAVE2], ids=["loop1", "loop2", "wave2"])
def test_evaluation(world, prt):
    (_, mean, _), (each, same_mean, logits) = world(2).reference(evaluated, None)
    ours = world(2).run(evaluated, prt)
    assert ours[1][0] == pytest.approx(each, rel=1e-6) and len(each) == 5
    assert ours[0][1] == ours[1][1] == pytest.approx(mean, rel=1e-6)
    torch.testing.assert_close(ours[1][2], logits)


class Expert(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.allreduce = False

    def forward(self, x):
        return self.linear(x)


class Renormalized(nn.Module):

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH, max_norm=1.0)

    def forward(self, x):
        return x + self.embedding.weight[0]


class SparseLookup(nn.Module):

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, x):
        return x + self.embedding(torch.zeros(1, dtype=torch.long))


class SparseWeight(SparseLookup):
    """A weight with a sparse gradient that nobody knows of before there is one."""

    def __init__(self):
        super().__init__()
        self.weight = self.embedding.weight
        del self.embedding

    def forward(self, x):
        return x + nn.functional.embedding(torch.zeros(1, dtype=torch.long), self.weight, sparse=True)


class TrainedLoss(nn.Module):

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, outputs, labels):
        return self.weight * mse(outputs, labels)


def refused(layer, stages, ranks, loss=lambda: mse):
    module = PipelineModule([LayerSpec(Block), LayerSpec(layer), LayerSpec(Block), LayerSpec(Block)],
                            num_stages=stages, loss_fn=loss(), partition_method="uniform")
    deepspeed.initialize(model=module, config=config(2, dp=ranks // stages, prt=LOOP2))


def test_experts_are_refused(world):
    with pytest.raises(TaskFailed, match="expert parallelism is not supported in a bidirectional pipeline") as failure:
        world(2).run(refused, Expert, 2, 2)
    assert {name for name, _ in failure.value.errors.values()} <= {"PRTConfigError", "RankFailedError"}


@pytest.mark.parametrize(("layer", "loss", "message"), [
    (Renormalized, None, "an embedding with max_norm changes its rows as it is used"),
    (SparseLookup, None, "the sparse gradients of an embedding cannot be summed over the two copies"),
    (Block, TrainedLoss, "loss_fn.weight belongs to no layer"),
])
def test_what_two_copies_cannot_share_is_refused(world, layer, loss, message):
    with pytest.raises(TaskFailed, match=message) as failure:
        world(2).run(refused, layer, 2, 2, *([] if loss is None else [loss]))
    assert {name for name, _ in failure.value.errors.values()} <= {"PRTConfigError", "RankFailedError"}


def sum_that_fails(prt):
    module = PipelineModule([LayerSpec(SparseWeight), *[LayerSpec(Block) for _ in range(3)]], num_stages=4,
                            loss_fn=mse, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt))
    engine.train_batch(training.data("blocks", engine))


def test_a_sum_of_two_copies_that_fails(world):
    """The pair that fails says so, and nobody waits for it."""
    with pytest.raises(TaskFailed) as failure:
        world(4).run(sum_that_fails, LOOP1)
    errors = failure.value.errors
    assert {rank: name for rank, (name, _) in errors.items()} == {
        0: errors[0][0], 1: "RankFailedError", 2: "RankFailedError", 3: errors[3][0]}
    assert any("sparse" in errors[rank][1] for rank in (0, 3))


def unfrozen(prt):
    """Layers that are unfrozen while training go on alike in both copies."""
    module = training.build("blocks", 2)
    frozen = {3, 5}
    for layer_id, layer in zip(range(module._local_start, module._local_stop), module.forward_funcs, strict=True):
        layer.requires_grad_(layer_id not in frozen)
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt),
                                      model_parameters=list(module.parameters()))
    iterator = training.data("blocks", engine)
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    module.requires_grad_(True)
    losses += [engine.train_batch(iterator).item() for _ in range(3)]
    return {"losses": losses, "states": [weights(engine)], "weights": weights(engine)}


@pytest.mark.parametrize("prt", [LOOP2, {**LOOP2, "placement": "wave"}])
def test_layers_unfrozen_while_training(world, prt):
    stock, ours = world(2).reference(unfrozen, None), world(2).run(unfrozen, prt)
    assert_copies_are_equal(ours)
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], rel=1e-6)
    assert_same(stock, ours, tolerance=1e-6)


def test_one_rank_is_refused(world):
    with pytest.raises(TaskFailed, match="a bidirectional pipeline needs at least 2 ranks"):
        world(1).run(refused, Block, 1, 1)
