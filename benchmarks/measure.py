"""Runs in the workers: one contender trains some batches, and every rank says how long each took and what it held."""

import gc
import itertools
import time
from typing import Any

import torch.distributed as dist
from torch import nn

from .contenders import Contender
from .link import emulated_link
from .settings import Emulation, Reviews


def measure(contender: Contender, setting: Emulation | Reviews, micro_batches: int, warm_up: int,
            steps: int) -> dict[str, Any]:
    """Train ``warm_up`` batches, then ``steps`` timed ones, each from a barrier to this rank's end of it."""
    is_emulated = isinstance(setting, Emulation)
    if is_emulated:
        from .emulated import DEVICE, emulated_work
        DEVICE.forget_activations()
        work = emulated_work(setting)
    else:
        from .real import real_work
        work = real_work(setting)
    report: dict[str, Any] = {}
    with emulated_link(setting.latency_ms / 1000):
        if contender.library == "torch":
            from . import peers_torch
            step = peers_torch.build(work, micro_batches, **contender.options)
        else:
            from . import engines
            step, engine = engines.build(work, micro_batches, **contender.options)
        losses = [step() for _ in range(warm_up)]
        if is_emulated and contender.is_ours:
            report = engines.predict(engine, setting)
        gc.collect()
        if is_emulated:
            DEVICE.start()
        seconds = []
        cpu_start = time.process_time()
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
        cpu_seconds = time.process_time() - cpu_start
    report |= {"seconds": seconds, "losses": losses, "cpu_ms": 1000 * cpu_seconds / steps}
    if is_emulated:
        report |= {"slept_ms": 1000 * DEVICE.busy / steps, "peak_layers": DEVICE.peak_layers,
                   "peak_bytes": DEVICE.peak_bytes}
    return report


def layers_alone(emulation: Emulation, micro_batches: int, steps: int) -> list[float]:
    """Let every rank run its share of the layers without any pipeline; returns the seconds of each step."""
    from .emulated import emulated_work
    work = emulated_work(emulation)
    model = nn.Sequential(*work.build(0, emulation.layers // emulation.ranks))
    seconds = []
    for _ in range(steps):
        batch = list(itertools.islice(work.batches(), micro_batches))
        dist.barrier()
        start = time.perf_counter()
        for inputs, labels in batch:
            work.loss(model(inputs), labels).backward()
        seconds.append(time.perf_counter() - start)
    return seconds
