"""fp16 and bf16 as in the stock engine: loss scales, steps skipped, norms and evaluation losses."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from . import training
from .training import BF16, ZERO1, Block, TiedEmbedding, assert_same, config, on_ends, project, weights
from .workers import TaskFailed

PLANS = pytest.mark.parametrize("prt", [{"reuse": 1}, {"reuse": 2}, {"reuse": 2, "placement": "wave"},
                                        {"reuse": 2, "direction": "bidirectional"}],
                                ids=["reuse1", "loop", "wave", "bidirectional"])
CLIPPED = {"gradient_clipping": 0.1}


def fp16(power: int) -> dict:
    return {"fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}


needs_fp16 = pytest.mark.skipif(not get_accelerator().is_fp16_supported(), reason="no fp16 here")


class Exploding(Block):
    """The gradients of its weights, and of those only, overflow in the second batch."""

    def __init__(self, gas: int) -> None:
        super().__init__()
        self.gas = gas
        self.backwards = 0
        self.linear.weight.register_hook(self.explode)

    def explode(self, gradient: torch.Tensor) -> torch.Tensor:
        self.backwards += 1
        return gradient * float("inf") if self.gas < self.backwards <= 2 * self.gas else gradient


def precise(prt, precision, more, explodes=False, gas=4):
    """Some batches; what is to be equal of each."""
    torch.manual_seed(1)
    first = LayerSpec(Exploding, gas // (1 + ((prt or {}).get("direction") == "bidirectional"))) if explodes \
        else LayerSpec(Block)
    module = PipelineModule([first, *training.blocks(11)], num_stages=torch.distributed.get_world_size(),
                            loss_fn=training.mse, seed_layers=True, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(gas, prt=prt, **precision, **more))
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16
    iterator = ((x.to(dtype), y) for x, y in training.vectors(100))
    report = {"losses": [], "scales": [], "skipped": [], "norms": [], "states": []}
    for _ in range(4):
        report["losses"].append(engine.train_batch(on_ends(engine, iterator)).item())
        report["scales"].append(getattr(engine.optimizer, "cur_scale", None))
        report["skipped"].append(engine.skipped_steps)
        report["norms"].append(float(engine.get_global_grad_norm()))
        report["states"].append(weights(engine))
    return report | {"weights": weights(engine)}


def assert_alike(stock, ours, prt):
    is_summed_otherwise = "direction" in prt
    assert_same(stock, ours, 5e-3 if is_summed_otherwise else 0.0)
    for theirs, mine in zip(stock, ours, strict=True):
        assert mine["scales"] == theirs["scales"]
        assert mine["skipped"] == theirs["skipped"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-2 if is_summed_otherwise else 1e-5)


@needs_fp16
@PLANS
@pytest.mark.parametrize("more", [{}, CLIPPED, ZERO1], ids=["plain", "clipped", "zero1"])
@pytest.mark.parametrize("power", [8, 22])
def test_fp16(world, prt, more, power):
    """With a scale that fits, and one that ZeRO-1 has to lower."""
    stock = world(2).reference(precise, None, fp16(power), more)
    assert (stock[0]["skipped"][-1] > 0) == (power == 22 and more == ZERO1)
    assert_alike(stock, world(2).run(precise, prt, fp16(power), more), prt)


@PLANS
@pytest.mark.parametrize("more", [{}, ZERO1], ids=["zero0", "zero1"])
@pytest.mark.parametrize("precision", [pytest.param(fp16(8), marks=needs_fp16), BF16], ids=["fp16", "bf16"])
def test_overflow_on_one_stage_skips_the_step_everywhere(world, prt, precision, more):
    """Case 42."""
    stock = world(2).reference(precise, None, precision, more, True)
    assert [report["skipped"] for report in stock] == [[0, 1, 1, 1]] * 2
    ours = world(2).run(precise, prt, precision, more, True)
    assert_alike(stock, ours, prt)
    for report in ours:
        before, skipped = report["states"][:2]
        torch.testing.assert_close(skipped, before, rtol=0, atol=0)


def evaluations(prt):
    """Case 16: a loss in bf16."""
    module = training.build("blocks", 2)
    module.loss_fn = torch.nn.functional.mse_loss
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt, **BF16))
    iterator = ((x.bfloat16(), y.bfloat16()) for x, y in training.vectors(3))
    losses = []
    for _ in range(2):
        engine.train_batch(on_ends(engine, iterator))
        losses.append(engine.eval_batch(on_ends(engine, iterator)))
    return [loss.item() for loss in losses], str(losses[0].dtype)


@PLANS
def test_an_evaluation_loss_in_bf16_is_the_same_on_every_rank(world, prt):
    first, second = world(2).run(evaluations, prt)
    assert first == second
    expected = world(2).reference(evaluations, None)[-1]
    assert first[0] == pytest.approx(expected[0], rel=1e-2 if "direction" in prt else 0)
    assert first[1] == expected[1]


def embedding_alone(prt, stages):
    """Case 27: the first of three ranks holds nothing but a tied embedding."""
    torch.manual_seed(1)
    layers = [TiedLayerSpec("embedding", TiedEmbedding, 16, training.WIDTH), LayerSpec(Block),
              TiedLayerSpec("embedding", TiedEmbedding, 16, training.WIDTH, forward_fn=project)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=training.cross_entropy, seed_layers=True,
                            partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(3, prt=prt, **BF16, **ZERO1, **CLIPPED))
    return [engine.train_batch(on_ends(engine, training.tokens(3))).item() for _ in range(4)]


@pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
def test_a_tied_embedding_alone_on_the_first_rank(world, direction):
    expected, = world(1).reference(embedding_alone, None, 1)
    for losses in world(3).run(embedding_alone, {"reuse": 1, "direction": direction}, 3):
        assert losses == pytest.approx(expected, rel=1e-2)


@needs_fp16
@PLANS
def test_fp16_with_tied_weights_on_two_replicas(world, prt):
    more = {**fp16(8), **ZERO1, **CLIPPED}
    stock = world(4).reference(training.train, "tied", 2, config(4, dp=2, **more), steps=4)
    ours = world(4).run(training.train, "tied", 2, config(4, dp=2, prt=prt, **more), steps=4)
    assert_same(stock, ours, 5e-3)
    for theirs, mine in zip(stock, ours, strict=True):
        assert float(mine["norm"]) == pytest.approx(float(theirs["norm"]), rel=1e-2)


def copies_on_last_rank(more):
    """The last rank holds nothing but the second layer of a tied key."""
    layers = [TiedLayerSpec("embedding", TiedEmbedding, 16, training.WIDTH), LayerSpec(Block), LayerSpec(Block),
              torch.tanh, TiedLayerSpec("embedding", TiedEmbedding, 16, training.WIDTH, forward_fn=project)]
    module = PipelineModule(layers, num_stages=2, loss_fn=training.cross_entropy, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=config(2, prt={"reuse": 1, "partition": [0, 3, 5]}, **more))
    iterator = on_ends(engine, training.MODELS["tied"][1](3))
    return [engine.train_batch(iterator).item() for _ in range(2)]


def test_a_rank_without_a_norm(world):
    assert world(2).run(copies_on_last_rank, ZERO1)
    with pytest.raises(TaskFailed, match="all weights that rank 1 trains are copies of those") as failure:
        world(2).run(copies_on_last_rank, BF16)
    assert {name for name, _ in failure.value.errors.values()} == {"PRTConfigError", "RankFailedError"}
