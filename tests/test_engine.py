"""PRTPipelineEngine against the stock engine: the same losses and weights."""

from typing import Any

import pytest
import torch

from deepspeed_prt.program.build import build
from deepspeed_prt.program.placement import Placement
from deepspeed_prt.split_backward import SplitBackward

from . import training
from .training import BF16, ZERO1, assert_same, config
from .workers import TaskFailed


@pytest.mark.parametrize("gas", [1, 2, 4, 7])
@pytest.mark.parametrize(("ranks", "prt"), [
    (2, {"reuse": 2}),
    (2, {"reuse": 2, "placement": "wave"}),
    (4, {"reuse": 3}),
    (4, {"reuse": 3, "placement": "wave"}),
])
def test_weights_are_bit_identical(world, ranks, prt, gas):
    stock = world(ranks).reference(training.train, "blocks", ranks, config(gas))
    assert_same(stock, world(ranks).run(training.train, "blocks", ranks, config(gas, prt=prt)))


@pytest.mark.parametrize("schedule", ["auto", "interleaved_1f1b"])
@pytest.mark.parametrize("model", ["blocks", "tied", "dropout"])
@pytest.mark.parametrize("prt", [{"reuse": 2}, {"reuse": 2, "placement": "wave"}], ids=["loop", "wave"])
def test_a_split_backward_changes_no_bit(world, prt, model, schedule):
    stock = world(2).reference(training.train, model, 2, config(4))
    split = {**prt, "split_backward": True, "schedule": schedule}
    assert_same(stock, world(2).run(training.train, model, 2, config(4, prt=split)))


def train_and_count_deferring_layers(*args: Any) -> dict[str, Any]:
    """As :func:`training.train`, with how many layers of this rank may defer weight gradients, in each batch."""
    counts: list[int] = []
    installed = SplitBackward.installed

    def count(self: SplitBackward, layers: list[torch.nn.Module], tied: Any) -> Any:
        counts.append(len(layers))
        return installed(self, layers, tied)

    SplitBackward.installed = count
    try:
        return training.train(*args) | {"counts": counts}
    finally:
        SplitBackward.installed = installed


def test_only_layers_of_stages_that_the_program_splits_defer_anything(world):
    stock = world(2).reference(training.train, "blocks", 2, config(4), 3)
    ours = world(2).run(train_and_count_deferring_layers, "blocks", 2,
                        config(4, prt={"reuse": 3, "split_backward": True}), 3)
    assert_same(stock, ours)
    assert build("auto", Placement("loop", 2, 3), 4, split=True).split_stages == {4, 5}, "of 6, with 2 layers each"
    assert ours[0]["counts"] == ours[1]["counts"] == [2, 2, 2]


LOOP2, WAVE2 = {"reuse": 2}, {"reuse": 2, "placement": "wave"}
LOOP3, WAVE3 = {"reuse": 3}, {"reuse": 3, "placement": "wave"}
BOTH = pytest.mark.parametrize("prt", [LOOP2, WAVE2], ids=["loop", "wave"])


@BOTH
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["auto", "gpipe", "breadth_first"])
def test_every_schedule_and_world(world, ranks, schedule, prt):
    stock = world(ranks).reference(training.train, "blocks", ranks, config(3), steps=3)
    assert_same(stock, world(ranks).run(training.train, "blocks", ranks, config(3, prt={**prt, "schedule": schedule}),
                                        steps=3))


@BOTH
def test_clipping_that_bites(world, prt):
    clipped = {"gradient_clipping": 0.01}
    stock = world(2).reference(training.train, "blocks", 2, config(4, **clipped))
    ours = world(2).run(training.train, "blocks", 2, config(4, prt=prt, **clipped))
    unclipped = world(2).run(training.train, "blocks", 2, config(4))
    assert_same(stock, ours, tolerance=1e-6)
    assert stock[0]["losses"] != unclipped[0]["losses"]


@pytest.mark.parametrize("reduction", [{"communication_data_type": "bf16"}, {"gradient_predivide_factor": 3.0}])
def test_what_reducing_among_one_replica_does_to_gradients(world, reduction):
    stock = world(2).reference(training.train, "blocks", 2, config(4, **reduction))
    assert_same(stock, world(2).run(training.train, "blocks", 2, config(4, prt=LOOP2, **reduction)))


@BOTH
@pytest.mark.parametrize("interval", [0, 1, 2])
def test_dropout_under_seed_layers_with_an_evaluation_in_between(world, prt, interval):
    more = {"seed_layers": True, "activation_checkpoint_interval": interval, "evaluate_after": 1}
    stock = world(2).reference(training.train, "dropout", 2, config(3), **more)
    assert_same(stock, world(2).run(training.train, "dropout", 2, config(3, prt=prt), **more))


@pytest.mark.parametrize(("ranks", "prt"), [(2, LOOP2), (2, WAVE2), (4, LOOP3), (4, WAVE3), (3, WAVE2)])
def test_tied_embedding(world, ranks, prt):
    stock = world(ranks).reference(training.train, "tied", ranks, config(4))
    assert_same(stock, world(ranks).run(training.train, "tied", ranks, config(4, prt=prt)))


@BOTH
@pytest.mark.parametrize("model", ["blocks", "tied"])
def test_data_parallel_beside_pipeline(world, prt, model):
    stock = world(4).reference(training.train, model, 2, config(3, dp=2))
    assert_same(stock, world(4).run(training.train, model, 2, config(3, dp=2, prt=prt)))


PRECISIONS = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "bf16_zero1_fp32_grads": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                              "data_types": {"grad_accum_dtype": "fp32"}},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("model", ["blocks", "tied"])
def test_mixed_precision_and_zero(world, precision, dp, model):
    more = PRECISIONS[precision]
    stock = world(2 * dp).reference(training.train, model, 2, config(3, dp=dp, **more), steps=3)
    ours = world(2 * dp).run(training.train, model, 2, config(3, dp=dp, prt=LOOP2, **more), steps=3)
    assert_same(stock, ours, tolerance=1e-6 if precision == "zero1" else 2e-2)


def _generator(module):
    return {"model_parameters": (p for p in module.parameters() if p.requires_grad)}


def _lazy(module):
    return {"model_parameters": module.parameters()}


def _list(module):
    return {"model_parameters": list(module.parameters())}


def _groups(module):
    decayed = [p for name, p in module.named_parameters() if name.endswith("weight")]
    others = [p for name, p in module.named_parameters() if not name.endswith("weight")]
    return {"model_parameters": [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]}


def _optimizer(module):
    return {"optimizer": torch.optim.AdamW(_groups(module)["model_parameters"], lr=0.01)}


def _callable(module):
    return {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}


def _callable_and_groups(module):
    return {**_groups(module), **_callable(module)}


def _only_some(module):
    """A parameter left out of the list is not trained."""
    return {"model_parameters": [p for name, p in module.named_parameters() if name.endswith("weight")]}


def _frozen(module):
    for index, function in enumerate(module.forward_funcs):
        if (module._local_start + index) % 3 == 1:
            function.linear.weight.requires_grad_(False)
    return _generator(module)


def _loaded(module):
    generator = torch.Generator().manual_seed(7 + module.stage_id)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return {}


class Adapter(torch.nn.Module):
    """A low-rank adapter around a Linear, as users inject them after building the model."""

    def __init__(self, base, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2, generator=generator))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.t() @ self.up.t())


def _adapted(module):
    for index, function in enumerate(module.forward_funcs):
        function.linear = Adapter(function.linear, module._local_start + index)
    return {"model_parameters": [p for p in module.parameters() if p.requires_grad]}


def _unpicklable(module):
    """Layers that cannot be pickled are built anew and filled."""
    for index, function in enumerate(module.forward_funcs):
        function.unpicklable = lambda: None
        if index == 1:
            function.linear.bias.requires_grad_(False)
    return _loaded(module)


def _halved(gradient):
    return gradient / 2


def _clamped(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def _hooked(module):
    """Parameters with hooks, before and after accumulation."""
    for function in module.forward_funcs:
        function.linear.weight.register_hook(_halved)
        function.linear.bias.register_post_accumulate_grad_hook(_clamped)
    return {}


def _hooked_and_unpicklable(module):
    return {**_hooked(module), **_unpicklable(module)}


def _shared(module):
    """Two layers of one stage share a weight without being tied."""
    module.forward_funcs[1].linear.weight = module.forward_funcs[0].linear.weight
    return _list(module)


def _same_dicts_twice(module):
    groups = _groups(module)["model_parameters"]
    return {"optimizer": torch.optim.AdamW(groups, lr=0.01), "model_parameters": groups}


def _reversed(module):
    return {"model_parameters": list(module.parameters())[::-1]}


def _named(module):
    return {"optimizer": torch.optim.AdamW(module.named_parameters(), lr=0.01)}


def _ends_apart(module):
    """The first and the last layer in a group of their own, as an embedding and a head with another learning rate."""
    ends = [p for name, p in module.named_parameters() if name.startswith(("0.", "11."))]
    others = [p for name, p in module.named_parameters() if not name.startswith(("0.", "11."))]
    return {"model_parameters": [{"params": ends, "lr": 1e-3}, {"params": others}]}


WAVE = {"reuse": 2, "placement": "wave"}


@pytest.mark.parametrize(("prt", "more"), [({"reuse": 2}, ZERO1), (WAVE, {}), (WAVE, BF16)])
def test_groups_of_some_layers(world, prt, more):
    stock = world(2).reference(training.train, "blocks", 2, config(3, **more), prepare=_ends_apart, steps=3)
    ours = world(2).run(training.train, "blocks", 2, config(3, prt=prt, **more), prepare=_ends_apart, steps=3)
    assert_same(stock, ours)


def test_a_rank_without_a_group_is_refused_where_norms_are_taken_by_groups(world):
    with pytest.raises(TaskFailed) as failure:
        world(2).run(training.train, "blocks", 2, config(3, prt=WAVE, **ZERO1), prepare=_ends_apart)
    assert sorted(failure.value.errors) == [0, 1]
    for name, text in failure.value.errors.values():
        assert name == "PRTConfigError"
        assert text.startswith("the weights that rank 1 holds are in 1 of the parameter groups, those of rank 0 in 2")


PREPARATIONS = [_shared, _same_dicts_twice, _reversed, _named, _generator, _lazy, _list, _groups, _optimizer, _callable,
                _callable_and_groups, _only_some, _frozen, _loaded, _adapted, _unpicklable, _hooked,
                _hooked_and_unpicklable]


@BOTH
@pytest.mark.parametrize("prepare", PREPARATIONS)
def test_parameters_and_changes_after_construction(world, prt, prepare):
    stock = world(2).reference(training.train, "blocks", 2, config(3), prepare=prepare, steps=3)
    assert_same(stock, world(2).run(training.train, "blocks", 2, config(3, prt=prt), prepare=prepare, steps=3))


def _first_half_frozen(module):
    for layer_id, function in zip(range(module._local_start, module._local_stop), module.forward_funcs, strict=True):
        function.requires_grad_(layer_id >= 6)
    return {"model_parameters": [p for p in module.parameters() if p.requires_grad]}


def _last_half_frozen(module):
    for layer_id, function in zip(range(module._local_start, module._local_stop), module.forward_funcs, strict=True):
        function.requires_grad_(layer_id < 6)
    return {"model_parameters": [p for p in module.parameters() if p.requires_grad]}


@pytest.mark.parametrize("prt", [{"reuse": 1}, LOOP2, WAVE2], ids=["reuse1", "loop", "wave"])
@pytest.mark.parametrize("prepare", [_first_half_frozen, _last_half_frozen])
def test_a_frozen_rank(world, prt, prepare):
    """The stock engine cannot train it on two ranks, so one rank is the reference."""
    stock = world(1).reference(training.train, "blocks", 1, config(3), prepare=prepare, steps=3)
    ours = world(2).run(training.train, "blocks", 2, config(3, prt=prt), prepare=prepare, steps=3)
    assert_same(stock * 2, ours)
