"""Cases from people who use DeepSpeed pipelines; the numbers are those of the list the cases were collected in."""

import copy
import random
import time
from types import MethodType

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from . import training
from .training import (
    BF16,
    MICRO_BATCH,
    WIDTH,
    ZERO1,
    Block,
    assert_same,
    blocks,
    config,
    mse,
    on_ends,
    vectors,
    weights,
)
from .workers import TaskFailed

PLANS = pytest.mark.parametrize("prt", [{"reuse": 1}, {"reuse": 2}, {"reuse": 2, "placement": "wave"}],
                                ids=["reuse1", "loop", "wave"])


class Tuples(nn.Module):
    """Applies a block to one member of a tuple and passes the others on."""

    def __init__(self, index=0, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index = index

    def forward(self, inputs):
        inputs = list(inputs)
        inputs[self.index] = torch.tanh(self.linear(inputs[self.index]))
        return tuple(inputs)


class Only(nn.Module):
    """Takes one member of a tuple, leaving the others unused."""

    def __init__(self, index=0):
        super().__init__()
        self.index = index

    def forward(self, inputs):
        return inputs[self.index]


class WithOnes(nn.Module):
    """Returns (h, ones), where the ones need no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x)), torch.ones_like(x, requires_grad=False) * 2


class Multiply(nn.Module):

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        x, factor = inputs
        return torch.tanh(self.linear(x * factor)), factor


class Twice(nn.Module):
    """Returns two floats that both require a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        h = torch.tanh(self.linear(x))
        return h, h * 2


class InPlace(nn.Module):
    """Works in place on its input, which is the first thing of its stage."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.tanh(x.mul_(0.5)))


class Masked(nn.Module):
    """(h, bool mask, int32 ids) in and out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        h, mask, ids = inputs
        assert mask.dtype == torch.bool and ids.dtype == torch.int32
        h = self.linear(h).masked_fill(mask[:, 0, 0, :, None], 0.0) + ids[..., None].to(h.dtype) / 8
        return torch.tanh(h), mask, ids


class Nothing(nn.Module):
    """A layer without parameters."""

    def forward(self, x):
        return torch.tanh(x)


class Conjugate(nn.Module):
    """Gives complex numbers that have yet to be conjugated."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.complex(self.linear(x), x).conj()


class Real(nn.Module):

    def forward(self, z):
        return torch.tanh(z.real + z.imag)


class Mapped(nn.Module):
    """Runs its modules under a transform of torch.func."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return torch.vmap(lambda row: self.norm(torch.tanh(self.linear(row))))(x)


def take_first(outputs, labels):
    return mse(outputs[0], labels)


def labels_in_dict(outputs, labels):
    return mse(outputs, labels["targets"])


def labels_in_list(outputs, labels):
    return mse(outputs * labels[1], labels[0])


def with_metric(outputs, labels):
    return mse(outputs, labels), (outputs - labels).abs().mean()


def mixed_tuple(seed):
    for x, y in vectors(seed):
        yield (torch.arange(6).reshape(MICRO_BATCH, 3), x, torch.tensor([True, False]), x.double(),
               torch.arange(3, dtype=torch.int16)), y


def masked(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for x, y in vectors(seed):
        mask = torch.rand(MICRO_BATCH, 1, 3, 3, generator=generator) < 0.3
        yield (x.to(dtype), mask, torch.randint(4, (MICRO_BATCH, 3), generator=generator, dtype=torch.int32)), y


def lists(seed):
    for x, y in vectors(seed):
        yield [x, x], [y, torch.full_like(y, 0.5)]


def dict_labels(seed):
    for x, y in vectors(seed):
        yield x, {"targets": y}


def varying(seed):
    generator = torch.Generator().manual_seed(seed)
    for length in [3, 5, 2, 4] * 50:
        yield tuple(torch.randn(MICRO_BATCH, length, WIDTH, generator=generator) for _ in range(2))


def short_last(seed):
    generator = torch.Generator().manual_seed(seed)
    for size in [4, 4, 2] * 50:
        yield tuple(torch.randn(size, 3, WIDTH, generator=generator) for _ in range(2))


CASES = {
    # name: (layers, data, loss, module arguments)
    "mixed_dtypes": (lambda: [LayerSpec(Tuples, 1) for _ in range(8)] + [LayerSpec(Only, 1)], mixed_tuple, mse, {}),
    "mixed_dtypes_dynamic": (lambda: [LayerSpec(Tuples, 1) for _ in range(8)] + [LayerSpec(Only, 1)], mixed_tuple,
                             mse, {"dynamic_shape": True}),
    "float_without_gradient": (lambda: [LayerSpec(WithOnes)] + [LayerSpec(Multiply) for _ in range(7)], vectors,
                               take_first, {}),
    "unused_float": (lambda: [LayerSpec(Twice) for _ in range(8)], vectors, take_first, {}),
    "in_place": (lambda: [LayerSpec(InPlace) for _ in range(8)], vectors, mse, {}),
    "masks": (lambda: [LayerSpec(Masked) for _ in range(8)], masked, take_first, {}),
    "conjugate": (lambda: [layer for _ in range(4) for layer in (LayerSpec(Conjugate), LayerSpec(Real))], vectors, mse,
                  {}),
    "transforms": (lambda: [LayerSpec(Mapped) for _ in range(8)], vectors, mse, {}),
    "lists": (lambda: [LayerSpec(Only)] + blocks(7), lists, labels_in_list, {}),
    "dict_labels": (lambda: blocks(8), dict_labels, labels_in_dict, {}),
    "varying_lengths": (lambda: blocks(8), varying, mse, {"dynamic_shape": True}),
    "short_last": (lambda: blocks(8), short_last, mse, {"dynamic_shape": True}),
    "parameterless": (lambda: [LayerSpec(Nothing), LayerSpec(Block), LayerSpec(Nothing), torch.tanh,
                               LayerSpec(Nothing), LayerSpec(Block), LayerSpec(Nothing), LayerSpec(Nothing)],
                      vectors, mse, {}),
    "module_objects": (lambda: [Block() for _ in range(4)] + [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Block()) for _ in range(4)], vectors, mse, {}),
    "modules_in_one": (lambda: nn.Sequential(*(Block() for _ in range(8))), vectors, mse, {}),
    "two_layers": (lambda: blocks(2), vectors, mse, {}),
    "three_layers": (lambda: [LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Tanh(), LayerSpec(nn.Linear, WIDTH, WIDTH)],
                     vectors, mse, {}),
}


def make(case, stages, **kwargs):
    layers, _, loss_fn, module_arguments = CASES[case]
    torch.manual_seed(1)
    return PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, seed_layers=True,
                          **{"partition_method": "uniform", **module_arguments, **kwargs})


def run_case(case, stages, ds_config, steps=3):
    engine, *_ = deepspeed.initialize(model=make(case, stages), config=copy.deepcopy(ds_config))
    iterator = on_ends(engine, CASES[case][1](5))
    losses = [engine.train_batch(iterator).item() for _ in range(steps)]
    return {"losses": losses, "weights": weights(engine)}


@PLANS
@pytest.mark.parametrize("case", [name for name in CASES if not name.endswith("layers")])
def test_equals_the_sequential_model(world, case, prt):
    """Cases 1, 2, 3, 7, 8, 10, 11, 28 and others, some of which stop the stock engine."""
    stock = world(1).reference(run_case, case, 1, config(3))
    assert_same(stock * 2, world(2).run(run_case, case, 2, config(3, prt=prt)), tolerance=1e-6)


@pytest.mark.parametrize("case", ["two_layers", "three_layers"])
@pytest.mark.parametrize("reuse", ["auto", 1])
def test_fewer_layers_than_ranks(world, case, reuse):
    """Case 28."""
    stock = world(1).reference(run_case, case, 1, config(3))
    assert_same(stock * 3, world(3).run(run_case, case, 3, config(3, prt={"reuse": reuse})), tolerance=1e-6)


def test_masks_in_bf16_on_four_ranks(world):
    """Case 7."""
    losses = world(4).run(bf16_masks, 4, {"reuse": 2})
    stock = world(1).reference(bf16_masks, 1, None)
    assert losses[0] == pytest.approx(stock[0], rel=2e-2)
    assert all(rank == losses[0] for rank in losses)


def bf16_masks(stages, prt):
    engine, *_ = deepspeed.initialize(model=make("masks", stages), config=config(3, prt=prt, bf16={"enabled": True}))
    iterator = on_ends(engine, masked(5, torch.bfloat16))
    return [engine.train_batch(iterator).item() for _ in range(3)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("placement", ["loop", "wave"])
def test_all_sizes(world, ranks, placement):
    """Case 31: v 1-3, gas 1..2p+1 against one rank."""
    combinations = [(reuse, gas) for reuse in (1, 2, 3) for gas in range(1, 2 * ranks + 2, 1 + ranks // 3)]
    ours = world(ranks).run(train_all, ranks, placement, combinations)
    stock = world(1).reference(train_all, 1, None, combinations)
    for combination, losses, expected in zip(combinations, ours[0], stock[0], strict=True):
        assert losses == pytest.approx(expected, rel=1e-6), combination


def train_all(stages, placement, combinations):
    results = []
    for reuse, gas in combinations:
        prt = None if placement is None else {"reuse": reuse, "placement": placement}
        results.append(training.train("blocks", stages, config(gas, prt=prt), steps=2)["losses"])
    return results


@pytest.mark.parametrize("gas", [1, 2, 8])
def test_gradients_are_those_of_the_sequential_model(world, gas):
    """Case 34, and 35: two forwards of the last stage before its first backward."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    stock = world(1).reference(training.train, "blocks", 1, config(gas, **sgd), steps=1)
    for schedule in ("auto", "gpipe"):
        ours = world(2).run(training.train, "blocks", 2, config(gas, prt={"reuse": 3, "schedule": schedule}, **sgd),
                            steps=1)
        assert_same(stock * 2, ours, tolerance=1e-6)


# Evaluation


def evaluate(prt, model="blocks"):
    """Cases 13, 14, 17, 18: evaluations of all kinds between training steps."""
    engine, *_ = deepspeed.initialize(model=training.build(model, 2), config=config(3, prt=prt))
    iterator = training.data(model, engine)
    report = {"train": [], "eval": [], "lists": [], "logits": []}

    class Counting:
        """Counts what is read."""

        def __init__(self, seed, size=MICRO_BATCH):
            self.read = 0
            self.generator = torch.Generator().manual_seed(seed)
            self.size = size

        def __next__(self):
            self.read += 1
            return tuple(torch.randn(self.size, 3, WIDTH, generator=self.generator) for _ in range(2))

    for step, count in enumerate([None, 1, 2, 5]):
        report["train"].append(engine.train_batch(iterator).item())
        counter = Counting(step, size=4)
        if prt is None:
            engine.reset_activation_shape()
        report["eval"].append(engine.eval_batch(counter, num_micro_batches=count).item())
        if prt is None:
            engine.reset_activation_shape()
        assert counter.read == (3 if count is None else count)
        engine.total_loss = None  # the stock engine adds logits to the last training loss
        outputs = engine.eval_batch(Counting(step), compute_loss=False, reduce_output=None, num_micro_batches=count)
        report["lists"].append(None if outputs is None else torch.stack(outputs))
        loss, logits = engine.eval_batch(Counting(step), return_logits=True, num_micro_batches=count)
        report["logits"].append((loss.item(), logits))
        if prt:
            training.clean(engine)
    assert engine.global_steps == 4
    return report


@PLANS
def test_evaluation_between_training(world, prt):
    stock, ours = world(2).reference(evaluate, None), world(2).run(evaluate, prt)
    for expected, report in zip(stock, ours, strict=True):
        assert report["train"] == expected["train"]
        assert report["eval"] == expected["eval"]
        for mine, theirs in zip(report["lists"], expected["lists"], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
        for (loss, logits), (stock_loss, stock_logits) in zip(report["logits"], expected["logits"], strict=True):
            assert loss == stock_loss
            assert (logits is None) == (stock_logits is None)
            assert logits is None or torch.equal(logits, stock_logits)


def evaluate_metric(prt):
    """Case 15."""
    torch.manual_seed(1)
    module = PipelineModule(blocks(8), num_stages=2, loss_fn=with_metric)
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt=prt))
    results = engine.eval_batch(on_ends(engine, vectors(3)), reduce_output=None, bcast_loss=False)
    refused = None
    try:
        engine.train_batch(on_ends(engine, vectors(3)))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    try:
        engine.eval_batch(on_ends(engine, vectors(3)), reduce_output=None)
    except ValueError as error:
        hint = str(error)
    return results, refused, hint


@PLANS
def test_a_loss_with_a_metric(world, prt):
    reports = world(2).run(evaluate_metric, prt)
    assert [len(pair) for pair in reports[1][0]] == [2, 2] and reports[0][0] is None
    assert all("loss must be a scalar tensor" in refused for _, refused, _ in reports)
    assert all("bcast_loss=False" in hint for _, _, hint in reports)


class WithNone(nn.Module):

    def forward(self, x):
        return x, None


def returns_none(prt):
    module = PipelineModule([*blocks(3), LayerSpec(WithNone), LayerSpec(Only), *blocks(3)], num_stages=2, loss_fn=mse,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt=prt))
    engine.train_batch(on_ends(engine, vectors(3)))


def test_a_stage_that_returns_no_tensors_says_so(world):
    with pytest.raises(TaskFailed, match="stage 0 returns a tuple of Tensor, NoneType; the layer at the end"):
        world(2).run(returns_none, {"reuse": 1})


LOSSES = {"float": lambda outputs, labels: mse(outputs, labels).item(), "NoneType": lambda outputs, labels: None,
          "dict": lambda outputs, labels: {"loss": mse(outputs, labels)}}


def odd_loss(kind):
    module = PipelineModule(blocks(4), num_stages=2, loss_fn=LOSSES[kind], partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt={"reuse": 2}))
    engine.train_batch(on_ends(engine, vectors(3)))


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_is_no_tensor_says_so(world, kind):
    with pytest.raises(TaskFailed) as failure:
        world(2).run(odd_loss, kind)
    assert all(f"loss_fn returns a {kind}; it has to return a tensor" in text
               for _, text in failure.value.errors.values())
    assert failure.value.errors[1][0] == "PRTError"


class Scaled(nn.Module):
    """Cannot be pickled, and has attributes that scripts change."""

    def __init__(self):
        super().__init__()
        self.act = lambda x: torch.tanh(x)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1))
        self.scale = 1.0

    def forward(self, x):
        return self.act(self.inner(x)) * self.scale


def scaled(ranks, prt):
    module = PipelineModule([LayerSpec(Scaled) for _ in range(8)], num_stages=ranks, loss_fn=mse, seed_layers=True,
                            partition_method="uniform")
    for layer_id, layer in zip(range(module._local_start, module._local_stop), module.forward_funcs, strict=True):
        layer.scale = 1 + layer_id / 8
        layer.inner[1].negative_slope = 0.1 * layer_id
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    iterator = on_ends(engine, vectors(3))
    return [engine.train_batch(iterator).item() for _ in range(2)]


@pytest.mark.parametrize("prt", [{"reuse": 2}, {"reuse": 2, "direction": "bidirectional"}])
def test_attributes_of_layers_that_cannot_be_pickled(world, prt):
    stock = world(2).reference(scaled, 2, None)
    for expected, losses in zip(stock, world(2).run(scaled, 2, prt), strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)


def with_hook(prt):
    module = training.build("blocks", 2)
    for layer in module.forward_funcs:
        layer.linear.weight.register_hook(lambda gradient: gradient)
    deepspeed.initialize(model=module, config=config(3, prt=prt))


def test_a_hook_that_cannot_move_is_refused(world):
    with pytest.raises(TaskFailed, match="a hook on its parameter linear.weight cannot be pickled") as failure:
        world(2).run(with_hook, {"reuse": 2})
    assert {name for name, _ in failure.value.errors.values()} <= {"PRTConfigError", "RankFailedError"}


def _bound_forward(layer):
    def forward(self, x):
        return torch.tanh(self.linear(x)) * 0.9
    layer.forward = MethodType(forward, layer)


def _bound_forward_inside(layer):
    layer.linear.forward = MethodType(lambda self, x: nn.functional.linear(x, self.weight), layer.linear)


def _wrapped_forward(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 0.9


def _another_function(layer):
    layer.act = lambda x: torch.tanh(x) * 0.5


def _forward_hook(layer):
    layer.register_forward_hook(lambda module, inputs, outputs: outputs * 0.9)


def _forward_pre_hook_inside(layer):
    layer.inner[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9, ))


def changed(prt, layer_class, change):
    module = PipelineModule([LayerSpec(layer_class) for _ in range(8)], num_stages=2, loss_fn=mse,
                            partition_method="uniform")
    for layer in module.forward_funcs:
        change(layer)
    deepspeed.initialize(model=module, config=config(3, prt=prt))


@pytest.mark.parametrize(("layer_class", "change", "message"), [
    (training.Block, _bound_forward, r"_bound_forward.<locals>.forward\(\) was bound to it after it was built"),
    (training.Block, _bound_forward_inside, r"<lambda>\(\) was bound to it after it was built"),
    (Scaled, _wrapped_forward, "its forward is not what its spec makes"),
    (Scaled, _another_function, "its act is not what its spec makes"),
    (Scaled, _forward_hook, "its _forward_hooks is not what its spec makes"),
    (Scaled, _forward_pre_hook_inside, "its inner.1._forward_pre_hooks is not what its spec makes"),
])
def test_a_change_that_cannot_move_is_refused(world, layer_class, change, message):
    """Pickling takes bound methods for those of the class, and what is built anew knows of no change."""
    with pytest.raises(TaskFailed, match=message):
        world(2).run(changed, {"reuse": 2}, layer_class, change)


class HiddenTie(nn.Module):
    """Uses the weight of another layer that is not registered in it."""

    def __init__(self, other):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.others = [other]

    def forward(self, x):
        return self.linear(x) @ self.others[0].linear.weight.t()


def hidden_tie(place, prt):
    """The layer at ``place`` and the next one; layers 2 and 3 are a stage that moves, 1 and 2 are parted."""
    torch.manual_seed(5)
    layers = [training.Block() for _ in range(8)]
    layers[place + 1] = HiddenTie(layers[place])
    module = PipelineModule(layers, num_stages=2, loss_fn=mse, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    iterator = on_ends(engine, vectors(3))
    return [engine.train_batch(iterator).item() for _ in range(3)]


def test_weights_that_a_layer_uses_without_registering_them(world):
    assert world(2).run(hidden_tie, 2, {"reuse": 2}) == world(2).reference(hidden_tie, 2, None)
    with pytest.raises(TaskFailed, match="layers 1, 2 share parameters and would come to different ranks"):
        world(2).run(hidden_tie, 1, {"reuse": 2})


def all_forwards_first(placement, micro_batches, max_in_flight, order=None):
    order = order or range(micro_batches)
    return [[f"{stage}F{m}" for stage in placement.stages_on(rank) for m in order]
            + [f"{stage}B{m}" for stage in reversed(placement.stages_on(rank)) for m in range(micro_batches)]
            for rank in range(placement.ranks)]


def not_the_same_order_on_each_rank(placement, micro_batches, max_in_flight):
    order = list(range(micro_batches))[::1 if torch.distributed.get_rank() == 0 else -1]
    return all_forwards_first(placement, micro_batches, max_in_flight, order)


def with_own_order(prt):
    """A script may communicate between any two calls."""
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 2), config=config(3, prt=prt))
    iterator = training.data("blocks", engine)
    losses = []
    for _ in range(5):
        everyones = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyones, len(losses))
        assert everyones == [len(losses)] * len(everyones)
        losses.append(engine.train_batch(iterator).item())
    return losses


def test_an_order_of_the_users(world):
    prt = {"reuse": 1, "schedule": f"{__name__}:all_forwards_first", "max_in_flight": 3}
    assert world(2).run(with_own_order, prt) == world(2).reference(with_own_order, None)


def test_an_order_that_differs_between_ranks_is_refused(world):
    prt = {"reuse": 1, "schedule": f"{__name__}:not_the_same_order_on_each_rank", "max_in_flight": 3}
    with pytest.raises(TaskFailed, match="made different programs") as failure:
        world(2).run(with_own_order, prt)
    assert {name for name, _ in failure.value.errors.values()} <= {"PRTConfigError", "RankFailedError"}


# Data


def iterator_ends(prt, ranks):
    """Case 21: the iterators of some ranks end before the others'."""
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 4), config=config(3, prt=prt))
    source = vectors(3)
    short = iter([next(source) for _ in range(4)]) if engine.stage_id in ranks else vectors(3)
    engine.train_batch(on_ends(engine, short))
    try:
        engine.train_batch(on_ends(engine, short))
    except StopIteration as error:
        caught = f"{error}"
    before = weights(engine)
    loss = engine.train_batch(on_ends(engine, vectors(3))).item()
    after = weights(engine)
    changed = all(not torch.equal(before[i][n], after[i][n]) for i in before for n in before[i])
    return caught, loss, changed, engine.global_steps


@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("ranks", [(0, 3), (0, ), (3, )], ids=["both", "first", "last"])
def test_the_iterator_ends_inside_a_batch(world, ranks, direction):
    reports = world(4).run(iterator_ends, {"reuse": 2, "direction": direction}, ranks)
    expected, = {loss for _, loss, _, _ in world(4).reference(iterator_ends, {"reuse": 2}, (0, 3))}
    assert [loss for _, loss, _, _ in reports] == pytest.approx([expected] * 4, rel=1e-6)
    assert all(changed and steps == 2 for _, _, changed, steps in reports)
    assert all(f"rank {ranks[0]} failed while reading" in caught
               for rank, (caught, *_) in enumerate(reports) if rank not in ranks)


class RandomDataset(torch.utils.data.Dataset):
    """Draws from the global generator."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(3, WIDTH)
        return x, x * random.random()


def random_dataset(prt):
    """Case 22."""
    torch.manual_seed(1)
    module = PipelineModule(blocks(8), num_stages=2, loss_fn=mse)
    torch.manual_seed(5)
    random.seed(5)
    engine, _, _loader, _ = deepspeed.initialize(model=module, config=config(3, prt=prt),
                                                training_data=RandomDataset())
    return [engine.train_batch().item() for _ in range(3)]


@PLANS
def test_a_dataset_that_draws_from_the_global_generator(world, prt):
    assert world(2).run(random_dataset, prt) == world(2).reference(random_dataset, None)


def bad_batches(prt):
    """Cases 9, 10 and 11 without dynamic_shape."""
    outcomes = []
    for source in (lambda: ((x, y, x, y) for x, y in vectors(3)), lambda: varying(3), lambda: short_last(3)):
        engine, *_ = deepspeed.initialize(model=training.build("blocks", 2), config=config(3, prt=prt))
        try:
            outcomes.append(engine.train_batch(on_ends(engine, source())).item())
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@PLANS
def test_shapes_that_change_without_dynamic_shape(world, prt):
    for flat, lengths, short in world(2).run(bad_batches, prt):
        assert flat == pytest.approx(world(2).run(flat_tuple_stock)[0])
        assert ("dynamic_shape" in lengths and "rank 0" in lengths) or lengths.startswith("PRTError: stage 0")
        assert "dynamic_shape" in short


def flat_tuple_stock():
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 2), config=config(3))
    return engine.train_batch(on_ends(engine, ((x, y, x, y) for x, y in vectors(3)))).item()


# Failures


class Failing(nn.Module):
    """Raises in forward or backward of a micro-batch."""

    def __init__(self, where):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.where = where
        self.calls = 0

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        if self.training:
            self.calls += 1
            if self.calls == 2 and self.where == "forward":
                raise ZeroDivisionError("a bad layer")
            if self.calls == 2 and self.where == "backward":
                x.register_hook(self._fail)
        return x

    def _fail(self, gradient):
        raise ZeroDivisionError("a bad layer")


class FailingLoss:

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, labels):
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError("a bad loss")
        return mse(outputs, labels)


def fail(where, prt, place):
    """Case 62: the error, what follows when the script catches it, and that training goes on."""
    torch.manual_seed(1)
    layers = blocks(8)
    if where != "loss":
        layers[place] = LayerSpec(Failing, where)
    module = PipelineModule(layers, num_stages=4, loss_fn=FailingLoss() if where == "loss" else mse, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt))
    before = weights(engine)
    started = time.monotonic()
    try:
        engine.train_batch(on_ends(engine, vectors(3)))
        caught = "nothing"
    except Exception as error:
        caught = f"{type(error).__name__}: {error}"
    training.clean(engine)
    assert time.monotonic() - started < 30
    after = weights(engine)
    assert all(torch.equal(before[i][n], after[i][n]) for i in before for n in before[i])
    assert all(p.grad is None for p in module.parameters())
    return caught, [engine.train_batch(on_ends(engine, vectors(3))).item() for _ in range(2)]


@PLANS
@pytest.mark.parametrize(("where", "place"), [("forward", 0), ("forward", 5), ("backward", 2), ("loss", 7)])
def test_one_rank_raises(world, prt, where, place):
    reports = world(4).run(fail, where, prt, place)
    own = [rank for rank, (caught, _) in enumerate(reports) if caught.startswith("ZeroDivisionError")]
    assert len(own) == 1
    for rank, (caught, _) in enumerate(reports):
        assert rank in own or (f"rank {own[0]} failed while computing" in caught and "ZeroDivisionError" in caught)
    assert len({tuple(losses) for _, losses in reports}) == 1


def fail_in_eval(prt):
    """A rank that fails in an evaluation, which frees its slots sooner than training does."""
    torch.manual_seed(1)
    layers = blocks(7)
    module = PipelineModule([*layers, LayerSpec(Block)], num_stages=2, loss_fn=FailingLoss(), seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(6, prt=prt))
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(engine.eval_batch(on_ends(engine, vectors(3))).item())
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    training.clean(engine)
    return outcomes


@PLANS
def test_one_rank_raises_in_an_evaluation(world, prt):
    reports = world(2).run(fail_in_eval, prt)
    assert sorted(first.split(":")[0] for first, _ in reports) == ["RankFailedError", "ZeroDivisionError"]
    assert reports[0][1] == reports[1][1] and isinstance(reports[0][1], float)


class Sleepy(Block):
    """Sleeps a random time, so that ranks drift apart in every way."""

    def forward(self, x):
        time.sleep(random.random() / 500)
        return super().forward(x)


def sleep(prt):
    """Case 64."""
    torch.manual_seed(1)
    random.seed(torch.distributed.get_rank())
    module = PipelineModule([LayerSpec(Sleepy if prt else Block) for _ in range(8)], num_stages=2, loss_fn=mse,
                            seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt))
    iterator = on_ends(engine, vectors(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(50)], "weights": weights(engine)}


@pytest.mark.parametrize("placement", ["loop", "wave"])
def test_random_sleeps_race_nothing(world, placement):
    assert_same(world(2).reference(sleep, None), world(2).run(sleep, {"reuse": 2, "placement": placement}))


# Tied weights, partition, compile


def one_sided(stages, prt):
    """Case 37: a tied weight that only one side uses in a backward."""
    torch.manual_seed(1)
    layers = [TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH), *blocks(6),
              TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, forward_fn=lambda module, x: x + 1)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    iterator = on_ends(engine, vectors(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": {}}


@PLANS
def test_a_tied_weight_used_on_one_side(world, prt):
    """The stock engine deadlocks on two ranks."""
    stock = world(1).reference(one_sided, 1, None)
    assert_same(stock * 2, world(2).run(one_sided, 2, prt), tolerance=1e-6)


def tied_thrice(stages, prt):
    """Case 39."""
    torch.manual_seed(1)
    layers = [LayerSpec(Block) if index % 2 else
              TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"]) for index in range(5)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    iterator = on_ends(engine, vectors(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": weights(engine)}


@pytest.mark.parametrize(("ranks", "prt"), [(2, {"reuse": 2}), (2, {"reuse": 2, "placement": "wave"}),
                                            (3, {"reuse": 1})])
def test_one_key_on_three_layers(world, ranks, prt):
    stock = world(1).reference(tied_thrice, 1, None)
    assert_same(stock * ranks, world(ranks).run(tied_thrice, ranks, prt), tolerance=1e-5)


class TiedHead(nn.Module):
    """A head with the embedding's weight and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, WIDTH))
        self.bias = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x @ self.weight.t() + self.bias


def tied_head(prt):
    """Two classes of one key: on one rank the second must not become the first's module."""
    torch.manual_seed(1)
    layers = [TiedLayerSpec("t", nn.Embedding, 16, WIDTH), *blocks(6), TiedLayerSpec("t", TiedHead)]
    module = PipelineModule(layers, num_stages=2, loss_fn=training.cross_entropy, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    iterator = on_ends(engine, training.tokens(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(5)], "weights": weights(engine)}


@PLANS
def test_a_tied_head_of_another_class(world, prt):
    assert_same(world(2).reference(tied_head, None), world(2).run(tied_head, prt))


class OwnPartition(PipelineModule):
    """Case 30: sets parts itself, for any number of stages."""

    def _partition_layers(self, method="uniform"):
        self.parts = [0] + [2 + stage * (len(self._layer_specs) - 2) // self.num_stages
                            for stage in range(1, self.num_stages + 1)]
        self.parts[-1] = len(self._layer_specs)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class TwoPartsOnly(PipelineModule):

    def _partition_layers(self, method="uniform"):
        self.parts = [0, 5, len(self._layer_specs)]
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


def own_partition(cls, prt):
    torch.manual_seed(1)
    module = cls(blocks(8), num_stages=2, loss_fn=mse, seed_layers=True)
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    assert isinstance(module, cls) and type(module).__name__ == cls.__name__ and engine.module is module
    iterator = on_ends(engine, vectors(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": weights(engine),
            "parts": [int(part) for part in module.parts]}


@pytest.mark.parametrize("cls", [OwnPartition, TwoPartsOnly])
def test_a_subclass_with_its_own_partition(world, cls):
    stock = world(2).reference(own_partition, cls, None)
    ours = world(2).run(own_partition, cls, {"reuse": 2, "partition": [0, 1, 3, 6, 8]})
    assert_same(stock, ours)
    assert ours[0]["parts"] == [0, 1, 3, 6, 8]
    if cls is OwnPartition:
        assert_same(stock, world(2).run(own_partition, cls, {"reuse": 2}))
    else:
        with pytest.raises(TaskFailed, match=r"TwoPartsOnly\._partition_layers gave boundaries") as failure:
            world(2).run(own_partition, cls, {"reuse": 2})
        assert {name for name, _ in failure.value.errors.values()} == {"PRTConfigError"}


def compiled(prt):
    """Case 55."""
    module = training.build("blocks", 2)
    module.compile(backend="eager")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    is_compiled = all(f._compiled_call_impl is not None for f in module.forward_funcs)
    engine.compile(backend="eager")
    iterator = training.data("blocks", engine)
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    torch.compiler.reset()
    return {"losses": losses, "weights": weights(engine), "compiled": is_compiled}


@PLANS
def test_compiled_layers(world, prt):
    ours = world(2).run(compiled, prt)
    assert_same(world(2).reference(compiled, None), ours)
    assert all(report["compiled"] for report in ours)


def checkpointing(prt, use_reentrant):
    """Case 48: intervals that change between batches."""
    module = training.build("dropout", 2, activation_checkpoint_interval=1)
    engine, *_ = deepspeed.initialize(model=module,
                                      config=config(3, prt=prt, pipeline={"use_reentrant": use_reentrant}))
    iterator = training.data("dropout", engine)
    losses = []
    for interval in (0, 1, 2, 0):
        module.set_checkpoint_interval(interval)
        losses.append(engine.train_batch(iterator).item())
    return {"losses": losses, "weights": weights(engine)}


@PLANS
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_intervals_between_batches(world, prt, use_reentrant):
    assert_same(world(2).reference(checkpointing, None, use_reentrant), world(2).run(checkpointing, prt, use_reentrant))


def counted(prt, seed_layers):
    """How often the checkpoint function runs in a batch."""
    calls = []

    def counting(function, *args):
        calls.append(1)
        return deepspeed.checkpointing.checkpoint(function, *args)

    module = training.build("blocks", 2, seed_layers=seed_layers, activation_checkpoint_interval=1,
                            activation_checkpoint_func=counting)
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    engine.train_batch(training.data("blocks", engine))
    return len(calls)


@PLANS
@pytest.mark.parametrize("seed_layers", [True, False])
def test_every_layer_is_checkpointed(world, prt, seed_layers):
    assert world(2).run(counted, prt, seed_layers) == world(2).reference(counted, None, seed_layers) == [18, 18]


def with_partial(prt):
    """A function layer that is a partial of the user's own, and an activation that is compiled."""
    import functools
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (LayerSpec(Block), functools.partial(torch.softmax, dim=-1))]
    module = PipelineModule(layers, num_stages=2, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt, gradient_clipping=1.0))
    iterator = on_ends(engine, vectors(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": weights(engine)}


@PLANS
def test_a_partial_as_a_layer(world, prt):
    assert_same(world(2).reference(with_partial, None), world(2).run(with_partial, prt), tolerance=1e-6)


def compiled_tied(prt):
    module = training.build("tied", 2)
    module.compile(backend="eager")
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt=prt))
    iterator = training.data("tied", engine)
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    torch.compiler.reset()
    return {"losses": losses, "weights": {}}


@PLANS
def test_compiled_tied_layers(world, prt):
    assert_same(world(2).reference(compiled_tied, None), world(2).run(compiled_tied, prt), tolerance=1e-6)


@PLANS
@pytest.mark.parametrize("more", [{"flops_profiler": {"enabled": True, "profile_step": 2}},
                                  {"wall_clock_breakdown": True}], ids=["flops_profiler", "wall_clock_breakdown"])
def test_profiling(world, prt, more):
    """Case 56; both stop the stock engine, whose timers start twice, so it runs without."""
    assert_same(world(2).run(training.train, "blocks", 2, config(3)),
                world(2).run(training.train, "blocks", 2, config(3, prt=prt, **more)))


def live_tensors(prt, gas):
    """Case 60: the most stage inputs alive at once, and nothing alive after the batch."""
    import gc
    module = training.build("blocks", 2)
    engine, *_ = deepspeed.initialize(model=module, config=config(gas, prt=prt))
    iterator = training.data("blocks", engine)
    engine.train_batch(iterator)

    def count():
        gc.collect()
        return sum(1 for item in gc.get_objects() if torch.is_tensor(item) and item.shape == (MICRO_BATCH, 3, WIDTH))

    before = count()
    for _ in range(3):
        engine.train_batch(iterator)
    return before, count(), engine.num_pipe_buffers


@PLANS
def test_no_live_activation_after_a_batch(world, prt):
    for gas in (2, 6):
        for before, after, buffers in world(2).run(live_tensors, prt, gas):
            assert after <= before
            assert buffers <= 2 * prt["reuse"] + 2


# Optimizers


def torch_style(more, prt):
    """Case 36."""
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 2), config=config(3, prt=prt, **more))
    engine._support_torch_style_backward = True
    iterator = training.data("blocks", engine)
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": weights(engine)}


@PLANS
@pytest.mark.parametrize("more", [{}, BF16, ZERO1], ids=["fp32", "bf16", "zero1"])
def test_torch_style_backward(world, prt, more):
    stock = world(2).reference(training.train, "blocks", 2, config(3, **more), steps=3)
    assert_same(stock, world(2).run(torch_style, more, prt), tolerance=2e-2 if more == BF16 else 1e-6)


@PLANS
@pytest.mark.parametrize("more", [ZERO1, {**BF16, **ZERO1}], ids=["zero1", "bf16_zero1"])
def test_the_norm_counts_tied_weights_once(world, prt, more):
    """Case 40: as on one rank."""
    clipped = {"gradient_clipping": 0.1, **more}
    stock = world(1).reference(training.train, "tied", 1, config(4, **clipped), steps=1)
    for report in world(2).run(training.train, "tied", 2, config(4, prt=prt, **clipped), steps=1):
        assert report["norm"] > 0.1
        assert float(report["norm"]) == pytest.approx(float(stock[0]["norm"]), rel=1e-2 if "bf16" in more else 1e-5)


class Branch(nn.Module):
    """Uses its second branch only where the inputs say so."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        use = torch.distributed.get_rank() % 2 == 0
        return torch.tanh(self.always(x) + (self.sometimes(x) if use else 0))


def branches(more, prt):
    """Case 44: a branch that one data-parallel replica never uses."""
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Branch) for _ in range(8)], num_stages=2, loss_fn=mse, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, dp=2, prt=prt, **more))
    data = ((x.bfloat16(), y) if "bf16" in more else (x, y) for x, y in vectors(3))
    return [engine.train_batch(on_ends(engine, data)).item() for _ in range(3)]


@pytest.mark.parametrize("more", [{}, ZERO1, {**BF16, **ZERO1}], ids=["zero0", "zero1", "bf16_zero1"])
def test_a_branch_that_one_replica_never_uses(world, more):
    losses = world(4).run(branches, more, {"reuse": 2})
    assert losses[0] == losses[1] == losses[2] == losses[3]
    assert losses[0][-1] < losses[0][0]


@PLANS
def test_overlapped_reduction(world, prt):
    """Case 57."""
    more = {"zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True}, **BF16}
    stock = world(4).reference(training.train, "blocks", 2, config(3, dp=2, **more), steps=3)
    assert_same(stock, world(4).run(training.train, "blocks", 2, config(3, dp=2, prt=prt, **more), steps=3), 2e-2)


def none_in_the_middle(prt):
    """Case 23."""
    engine, *_ = deepspeed.initialize(model=training.build("blocks", 4), config=config(3, prt=prt))
    iterator = vectors(3) if engine.stage_id in (0, 3) else None
    return {"losses": [engine.train_batch(iterator).item() for _ in range(2)], "weights": weights(engine)}


@PLANS
def test_a_loader_on_the_ends_only(world, prt):
    assert_same(world(4).reference(none_in_the_middle, None), world(4).run(none_in_the_middle, prt))


def refilled(prt):
    """A loader that fills the same two tensors for each micro-batch."""
    torch.manual_seed(1)
    module = PipelineModule(blocks(8), num_stages=2, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(4, prt=prt))
    held = tuple(torch.zeros(MICRO_BATCH, 3, WIDTH) for _ in range(2))

    def fill(source):
        for batch in source:
            for tensor, values in zip(held, batch, strict=True):
                tensor.copy_(values)
            yield held

    iterator = on_ends(engine, fill(vectors(3)))
    losses = [engine.train_batch(iterator).item() for _ in range(3)]
    losses.append(engine.eval_batch(on_ends(engine, fill(vectors(4)))).item())
    return {"losses": losses, "weights": weights(engine)}


@PLANS
def test_a_loader_that_fills_the_same_tensors_again(world, prt):
    assert_same(world(2).reference(refilled, None), world(2).run(refilled, prt))


class Counted(nn.Module):
    """Hands on a buffer that it fills for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(MICRO_BATCH, 3, dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.count.copy_((x > 0).sum(-1))
        return self.linear(x), self.count


class Embedded(nn.Module):
    """Takes its time, so that the buffer may be filled again before it is received."""

    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(WIDTH + 1, WIDTH)

    def forward(self, inputs):
        time.sleep(0.02)
        x, count = inputs
        return torch.tanh(self.linear(x)) + self.embedding(count)


def counts_handed_on(prt):
    torch.manual_seed(1)
    module = PipelineModule([LayerSpec(Counted), LayerSpec(Embedded)], num_stages=2, loss_fn=mse, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(6, prt=prt))
    iterator = on_ends(engine, vectors(3))
    losses = [engine.train_batch(iterator).item() for _ in range(3)]
    losses.append(engine.eval_batch(on_ends(engine, vectors(4))).item())
    return {"losses": losses, "weights": weights(engine)}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_layer_that_hands_on_a_buffer_and_fills_it_again(world, schedule):
    stock = world(2).reference(counts_handed_on, None)
    assert_same(stock, world(2).run(counts_handed_on, {"reuse": 1, "schedule": schedule}))


WHOLE = {"pipe_partitioned": False, "grad_partitioned": False}


def sliced(prt):
    """Cases 25 and 58: two tensor-parallel ranks, data on the first of them, which set_batch_fn broadcasts."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    torch.manual_seed(1)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    module = PipelineModule(blocks(8), topology=topology, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt, pipeline=WHOLE))
    calls = []
    group = engine.grid.get_slice_parallel_group()
    first = torch.distributed.get_process_group_ranks(group)[0]

    def share(batch):
        calls.append(batch is not None)
        batch = batch or tuple(torch.zeros(MICRO_BATCH, 3, WIDTH) for _ in range(2))
        for tensor in batch:
            torch.distributed.broadcast(tensor, first, group=group)
        return batch

    engine.set_batch_fn(share)
    iterator = on_ends(engine, vectors(3)) if engine.grid.get_slice_parallel_rank() == 0 else None
    losses = [engine.train_batch(iterator).item() for _ in range(2)]
    return {"losses": losses, "weights": weights(engine), "calls": len(calls)}


@PLANS
def test_tensor_parallel_ranks_that_share_data(world, prt):
    ours = world(4).run(sliced, prt)
    assert_same(world(4).reference(sliced, None), ours)
    assert [report["calls"] for report in ours] == [6, 6, 6, 6]


def untrained_rank(prt, stages):
    """Case 28: in a loop of single layers the second rank gets the layers without parameters."""
    torch.manual_seed(1)
    layers = [LayerSpec(Block), nn.Tanh(), LayerSpec(Block), nn.Tanh()]
    module = PipelineModule(layers, num_stages=stages, loss_fn=mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt))
    iterator = on_ends(engine, vectors(3))
    return {"losses": [engine.train_batch(iterator).item() for _ in range(3)], "weights": weights(engine)}


def test_a_rank_with_nothing_to_train(world):
    stock = world(1).reference(untrained_rank, None, 1)
    assert_same(stock * 2, world(2).run(untrained_rank, {"reuse": 2}, 2))
