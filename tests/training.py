"""What the multi-process tests train: small models, and a task that reports losses and weights.

Everything here runs in the worker processes.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WIDTH = 8
MICRO_BATCH = 2

ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


class Block(nn.Module):
    """Linear and tanh, with dropout if asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class TiedEmbedding(nn.Embedding):
    """An embedding whose weight is the head's as well."""


def project(embedding: TiedEmbedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def blocks(count: int = 12, dropout: float = 0.0) -> list[LayerSpec]:
    return [LayerSpec(Block, dropout) for _ in range(count)]


def tied(count: int = 10) -> list[LayerSpec]:
    return [TiedLayerSpec("embedding", TiedEmbedding, 16, WIDTH), *blocks(count),
            TiedLayerSpec("embedding", TiedEmbedding, 16, WIDTH, forward_fn=project)]


def mse(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), labels.float())


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())


def vectors(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randn(MICRO_BATCH, 3, WIDTH, generator=generator),
               torch.randn(MICRO_BATCH, 3, WIDTH, generator=generator))


def tokens(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randint(16, (MICRO_BATCH, 3), generator=generator),
               torch.randint(16, (MICRO_BATCH, 3), generator=generator))


def config(gas: int = 4, dp: int = 1, prt: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config; ``prt`` is its section."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": gas,
        "train_batch_size": MICRO_BATCH * gas * dp,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **({} if prt is None else {"prt": prt}),
        **more,
    }


MODELS: dict[str, tuple[Callable[..., list], Callable, Callable]] = {
    "blocks": (blocks, vectors, mse),
    "dropout": (lambda: blocks(dropout=0.3), vectors, mse),
    "tied": (tied, tokens, cross_entropy),
}


def build(model: str, stages: int, seed_layers: bool = True, **kwargs: Any) -> PipelineModule:
    torch.manual_seed(1)
    layers, _, loss_fn = MODELS[model]
    return PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, seed_layers=seed_layers,
                          partition_method=kwargs.pop("partition_method", "uniform"), **kwargs)


def data(model: str, engine: Any) -> Iterator | None:
    """The data iterator of this rank: first and last rank only."""
    iterator = MODELS[model][1](100 + engine.grid.get_data_parallel_id())
    if engine.bfloat16_enabled():
        iterator = ((x.bfloat16() if x.is_floating_point() else x, y) for x, y in iterator)
    return on_ends(engine, iterator)


def on_ends(engine: Any, iterator: Iterator) -> Iterator | None:
    """The iterator where a script passes one: on the first and the last rank."""
    return iterator if engine.is_first_stage() or engine.is_last_stage() else None


def weights(engine: Any) -> dict[int, dict[str, torch.Tensor]]:
    """The state of each layer of this rank, by its place in the model."""
    module = engine.module
    ids = getattr(module, "layer_ids", range(module._local_start, module._local_stop))
    states = {}
    for layer_id, function in zip(ids, module.forward_funcs, strict=True):
        owner = function.args[0] if hasattr(function, "func") and function.args else function
        if isinstance(owner, nn.Module):
            states[layer_id] = {name: value.detach().float().clone() for name, value in owner.state_dict().items()}
    return states


def clean(engine: Any) -> None:
    """No live activation remains between batches."""
    for key, slots in engine.pipe_buffers.items():
        assert all(slot is None for slot in slots), f"{key} still holds {slots}"


def train(model: str, stages: int, ds_config: dict[str, Any], steps: int = 5,
          prepare: Callable[[PipelineModule], dict[str, Any]] | None = None,
          evaluate_after: int | None = None, **module_kwargs: Any) -> dict[str, Any]:
    """Train some steps; returns losses, the state of this rank's layers and the gradient norm."""
    module = build(model, stages, **module_kwargs)
    arguments = {} if prepare is None else prepare(module)
    engine, *_ = deepspeed.initialize(model=module, config=copy.deepcopy(ds_config), **arguments)
    if ds_config.get("prt"):
        assert type(engine).__name__ == "PRTPipelineEngine"
        assert type(module).__name__ == "PipelineModule"
    iterator = data(model, engine)
    losses = []
    for step in range(steps):
        losses.append(engine.train_batch(iterator).item())
        if ds_config.get("prt"):
            clean(engine)
        if step == evaluate_after:
            losses.append(engine.eval_batch(data(model, engine)).item())
    return {"losses": losses, "weights": weights(engine), "norm": engine.get_global_grad_norm()}


def merge(results: list[dict[str, Any]]) -> dict[int, dict[str, torch.Tensor]]:
    """The whole model from all ranks' reports."""
    merged: dict[int, dict[str, torch.Tensor]] = {}
    for result in results:
        merged.update(result["weights"])
    return merged


def assert_same(stock: list[dict[str, Any]], ours: list[dict[str, Any]], tolerance: float = 0.0) -> None:
    """Losses and weights agree: bit for bit, or to a relative tolerance."""
    for theirs, mine in zip(stock, ours, strict=True):
        torch.testing.assert_close(torch.tensor(mine["losses"]), torch.tensor(theirs["losses"]), rtol=tolerance, atol=0)
    expected, actual = merge(stock), merge(ours)
    assert expected.keys() == actual.keys()
    for layer_id, state in expected.items():
        for name, value in state.items():
            torch.testing.assert_close(actual[layer_id][name], value, rtol=tolerance, atol=tolerance,
                                       msg=lambda text, where=(layer_id, name): f"layer {where}: {text}")
