"""One rank of gpu_check.py: trains with the stock engine and with ours, and writes down what it saw."""

import faulthandler
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# DeepSpeed picks the device by the local rank. NCCL refuses two ranks on what it takes for one device of one host.
RANK, DEVICES = int(os.environ["RANK"]), int(os.environ["PRT_CHECK_DEVICES"])
if DEVICES:
    os.environ["LOCAL_RANK"] = str(RANK % DEVICES)
    if int(os.environ["WORLD_SIZE"]) > DEVICES:
        os.environ["NCCL_HOSTID"] = f"rank{RANK}"

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from deepspeed.runtime.pipe import schedule as ds  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402

from benchmarks.gpu_check import MODES, STACKS_S  # noqa: E402
from deepspeed_prt.schedule import ReduceReplicaGrads  # noqa: E402

WIDTH, ROWS, MICRO_BATCHES = 256, 8, 8
SCALE_POWER = 24
PASS = "gpu_check pass"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), labels.float())


def batches(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        yield inputs.to(dtype), torch.tanh(inputs.flip(1))


@contextmanager
def passes_marked(engine: Any) -> Iterator[None]:
    """Name in the profile what is done for micro-batches, and sums of copies.

    What comes between batches (agreeing that all went well, the optimizer's own waits) is not on the hot path.
    """
    handlers = dict(engine._INSTRUCTION_MAP)

    def marked(handler: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            with torch.profiler.record_function(PASS):
                handler(*args, **kwargs)
        return run

    hot = ds.BufferOpInstruction, ReduceReplicaGrads
    engine._INSTRUCTION_MAP = {kind: marked(handler) if issubclass(kind, hot) else handler
                               for kind, handler in handlers.items()}
    try:
        yield
    finally:
        engine._INSTRUCTION_MAP = handlers


def train(precision: str, prt: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """Losses, steps skipped as fp16 overflowed, waits of the host within the last batch, and the peak of memory."""
    module = PipelineModule([LayerSpec(Block) for _ in range(16)], num_stages=int(os.environ["WORLD_SIZE"]),
                            loss_fn=loss, partition_method="uniform", seed_layers=True)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        # Without ZeRO DeepSpeed does not scale a pipeline's loss; from this scale on, it has to come down first.
        config |= {"fp16": {"enabled": True, "initial_scale_power": SCALE_POWER, "hysteresis": 1},
                   "zero_optimization": {"stage": 1}}
    if prt is not None:
        config["prt"] = prt
    before = 0
    if DEVICES:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # what engines of earlier modes still hold
    engine, *_ = deepspeed.initialize(model=module, config=config)
    iterator = batches({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    losses = [engine.train_batch(iterator).item() for _ in range(steps - 1)]
    with torch.profiler.profile() as profiler, passes_marked(engine):
        losses.append(engine.train_batch(iterator).item())
    events = profiler.events()
    # The host's spans; the device has its own of each name, which end when it catches up.
    spans = [event.time_range for event in events if event.name == PASS and event.device_type == DeviceType.CPU]
    waits = sum(event.name in WAITS and any(span.start <= event.time_range.start <= span.end for span in spans)
                for event in events)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if DEVICES else 0.0
    return {"losses": losses, "skipped": engine.skipped_steps, "waits": waits, "peak_mib": peak}


def main() -> None:
    precision, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.dump_traceback_later(STACKS_S)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="nccl" if DEVICES else "gloo")
    report = {mode: train(precision, prt, steps) for mode, prt in MODES.items()}
    (folder / f"{RANK}.json").write_text(json.dumps(report), encoding="utf-8")
    torch.distributed.barrier()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
