"""DeepSpeed's engines as contenders: its own, and that of a ``"prt"`` section."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

from deepspeed_prt.program.bounds import ideal_time
from deepspeed_prt.program.costs import Costs
from deepspeed_prt.program.simulator import simulate

from .settings import Emulation
from .work import LEARNING_RATE, SEED, Work


def build(work: Work, micro_batches: int, dualpipev: bool = False,
          prt: dict[str, Any] | None = None) -> tuple[Callable[[], float], Any]:
    """A function that trains one batch and returns its loss, and the engine.

    Args:
        work: what to train.
        micro_batches: m.
        dualpipev: train DeepSpeed's DualPipeVModule.
        prt: the config's ``"prt"`` section.
    """
    module_class = DualPipeVModule if dualpipev else PipelineModule
    module = module_class(work.layers, num_stages=dist.get_world_size(), loss_fn=work.loss,
                          partition_method="uniform", seed_layers=True, base_seed=SEED)
    config = {
        "train_micro_batch_size_per_gpu": work.rows,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **({} if prt is None else {"prt": prt}),
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    module.seed_layers = False  # it was for equal weights at the start; torch's stages do not seed either
    batches = work.batches()
    return lambda: engine.train_batch(batches).item(), engine


def predict(engine: Any, emulation: Emulation) -> dict[str, float]:
    """What the simulator says of the very program that a PRT engine runs, once it has measured some batches.

    ``predicted_ratio`` is with the costs that the engine measured, ``planned_ratio`` with those that the layers are set
    to and no time for anything else.
    """
    program = engine._train_schedule().program
    placement = program.placement
    costs = Costs.uniform(placement, emulation.forward_ms, emulation.input_grad_ms, emulation.weight_grad_ms,
                          emulation.latency_ms)
    ideal = ideal_time(placement, program.micro_batches, costs)
    return {
        "planned_ratio": simulate(program, costs).makespan / ideal,
        "predicted_ratio": simulate(program, engine.measured_costs).makespan / ideal,
        "planned_peak_in_flight": program.peak,
    }
