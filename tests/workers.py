"""Worlds of real worker processes, started once and reused: importing deepspeed costs seconds a process."""

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = float(os.environ.get("PRT_TEST_TIMEOUT", "300"))
"""Seconds after which a task counts as hung."""

_ATTEMPTS = 3
"""How often to start processes: another program may take the port before they do."""


class TaskFailed(AssertionError):
    """A task raised on some rank; holds each rank's error."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"--- rank {rank}: {trace}" for rank, (_, _, trace) in sorted(errors.items())))
        self.errors = {rank: (name, text) for rank, (name, text, _) in errors.items()}


class World:
    """``size`` processes in one gloo process group, which run module-level functions within ``timeout`` seconds."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size = size
        self.timeout = timeout
        self._references: dict[bytes, bytes] = {}
        self._start()

    def _start(self) -> None:
        for _ in range(_ATTEMPTS):
            self._fork()
            if self._have_started():
                return
            self.close()
        raise RuntimeError(f"{self.size} worker processes did not start, {_ATTEMPTS} times")

    def _have_started(self) -> bool:
        try:
            return all(pipe.poll(self.timeout) and pipe.recv() for pipe in self._pipes)
        except (EOFError, ConnectionError):
            return False

    def _fork(self) -> None:
        # Imports are shared, and so is the memory they take, as far as the processes leave it alone. The libraries read
        # this when they are imported; what is forked must have no threads by then.
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["deepspeed.pipe", "deepspeed_prt.engine"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, port), daemon=False)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``task(*args, **kwargs)`` on every rank; returns what each returned.

        Raises:
            TaskFailed: a rank raised, died or hung.
        """
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # one that died is noticed when it does not answer
                pipe.send((task.__module__, task.__qualname__, args, kwargs))
        results: list[Any] = [None] * self.size
        errors: dict[int, tuple[str, str, str]] = {}
        deadline = time.monotonic() + self.timeout
        restart = False
        for rank, pipe in enumerate(self._pipes):
            try:
                if pipe.poll(max(deadline - time.monotonic(), 0.1)):
                    ok, value = pipe.recv()
                    if ok:
                        results[rank] = value
                    else:
                        errors[rank] = value
                    continue
                errors[rank] = ("Hang", "no answer", f"no answer within {self.timeout:g} s")
            except (EOFError, ConnectionError):
                errors[rank] = ("Died", "process died", "process died")
            restart = True
        if restart:
            self.close()
            self._start()
        if errors:
            raise TaskFailed(errors)
        return results

    def reference(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As :meth:`run`, once for all tests that ask for the same: for what others are compared with."""
        key = pickle.dumps((task, args, kwargs))
        if key not in self._references:
            # As bytes, since tensors from another process hold a file descriptor each.
            self._references[key] = pickle.dumps(self.run(task, *args, **kwargs))
        return pickle.loads(self._references[key])

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    gc.freeze()  # to look through what is shared would write to it
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import logging

    import torch
    torch.set_num_threads(1)
    import deepspeed
    deepspeed.utils.logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend="gloo")
    torch.distributed.barrier()  # all have opened each other's shared memory
    # Its files, 69 MB a rank, would outlive the processes.
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_{rank}"):
        file.unlink()
    pipe.send(True)
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        output = io.StringIO()
        try:
            task = importlib.import_module(module)
            for part in name.split("."):
                task = getattr(task, part)
            with contextlib.redirect_stdout(output):
                answer = True, task(*args, **kwargs)
        except Exception as error:
            answer = False, (type(error).__name__, str(error), traceback.format_exc() + output.getvalue()[-2000:])
        pipe.send(answer)
        del answer
        _forget_groups()


def _forget_groups() -> None:
    """Close the process groups of the last task, whose sockets would pile up."""
    import torch
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid
    from deepspeed.utils import groups
    from torch.distributed import distributed_c10d
    gc.collect()
    # Hooks keep what holds groups: those of the stock engine's last loss, and ZeRO's of each parameter.
    holders = (PipelineModule, DeepSpeedEngine, torch.nn.Parameter, DeepSpeedOptimizer, PipelineParallelGrid)
    for leftover in gc.get_objects():
        if issubclass(type(leftover), holders):
            leftover.__dict__.clear()
    gc.collect()
    dist.barrier()
    default = distributed_c10d._get_default_group()
    for group in list(distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)
    groups._WORLD_GROUP = None
    # What is left is code, a lot of it since torch and DeepSpeed import as they go: no need to look at it again.
    gc.freeze()
    sys.stdout.flush()
