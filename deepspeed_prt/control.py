"""The control plane: small host-side agreements between ranks, beside the tensors and never on the device."""

import atexit
import functools
import io
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from .errors import PoisonedMessage, RankFailedError

_TAG = 1
"""Of messages between two ranks, as those of channels may share their group."""

_FAILED, _FLAGGED = 1, 2
"""What a rank says of a batch."""

_EXIT_GRACE_S = 0.1


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """Give gloo's threads time before the interpreter ends.

    They let go of a collective's tensors a moment after it is done, for which they need the interpreter; if that is
    ending, the process aborts (pytorch/pytorch#190489). A script may well end right after its last batch.
    """
    atexit.register(time.sleep, _EXIT_GRACE_S)


class Control:
    """Gloo groups over the whole world and over this rank's pipe: DeepSpeed's, where they are of gloo.

    Every rank of the world has to construct one at the same time.
    """

    def __init__(self, grid: PipelineParallelGrid) -> None:
        self.global_rank = grid.global_rank
        self.pipe_ranks = grid.pp_group
        _let_gloo_finish_at_exit()
        if dist.get_backend() == "gloo":
            self._world, self.pipe_group = dist.group.WORLD, grid.pp_proc_group
            return
        self._world = dist.new_group(backend="gloo")
        for ranks in grid.pipe_groups:
            group = dist.new_group(ranks, backend="gloo")
            if self.global_rank in ranks:
                self.pipe_group = group

    def agree(self, error: BaseException | None, doing: str, when: float = 0.0, flag: bool = False) -> bool:
        """Carry on only if no rank has an error; a collective over the world. Returns whether any rank set ``flag``.

        Args:
            error: what went wrong here, if anything did.
            doing: what the ranks were doing, for the message.
            when: the time of the error. Others may follow from the first, which is the one that is named.
            flag: anything that all ranks have to know if it holds on one.

        Raises:
            BaseException: this rank's own error, with its traceback, if no other rank had one before.
            StopIteration: another rank's data iterator ended.
            RankFailedError: another rank has an error; the message names it.
        """
        return self.start_agreeing(error, doing, when, flag)()

    def start_agreeing(self, error: BaseException | None, doing: str, when: float = 0.0,
                       flag: bool = False) -> Callable[[], bool]:
        """As :meth:`agree`, but returns what waits for the others; a rank with an error waits at once."""
        said = torch.full((dist.get_world_size(), ), _FAILED * (error is not None) + _FLAGGED * flag, dtype=torch.uint8)
        heard = torch.empty_like(said)
        # In one hop: gloo's all-reduce goes around all ranks twice, and waits for each that is at work by then.
        work = dist.all_to_all_single(heard, said, group=self._world, async_op=True)

        def finish() -> bool:
            work.wait()
            answers = heard.tolist()
            if any(answer & _FAILED for answer in answers):
                self._raise_first(error, doing, when)
            return any(answer & _FLAGGED for answer in answers)

        if error is not None:
            finish()
        return finish

    def _raise_first(self, error: BaseException | None, doing: str, when: float) -> NoReturn:
        """Raise what failed first, or an error that names its rank."""
        report = None
        if error is not None and not isinstance(error, PoisonedMessage):
            report = (when, self.global_rank, type(error) is StopIteration, f"{type(error).__name__}: {error}")
        reports: list[tuple[float, int, bool, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report, group=self._world)
        first_at, failed, iterator_ended, text = min(report for report in reports if report is not None)
        if error is not None and report is not None and when <= first_at:
            raise error
        message = f"rank {failed} failed while {doing}: {text}"
        if iterator_ended:
            raise StopIteration(message)
        # An error of this rank after the first is most likely its consequence, and stays visible as the cause.
        raise RankFailedError(message) from error

    def gather(self, value: object) -> list[Any]:
        """What every rank of the pipe has to say, in pipe order."""
        values: list[Any] = [None] * len(self.pipe_ranks)
        dist.all_gather_object(values, value, group=self.pipe_group)
        return values

    def share(self, value: object) -> Any:
        """What the first rank of the world has to say; a collective over the world."""
        values = [value]
        dist.broadcast_object_list(values, 0, group=self._world)
        return values[0]

    def send(self, payload: bytes, pipe_rank: int) -> None:
        """Send bytes to another rank of the pipe; waits until they are there."""
        target = self.pipe_ranks[pipe_rank]
        dist.send(torch.tensor(len(payload)), target, group=self.pipe_group, tag=_TAG)
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), target, group=self.pipe_group, tag=_TAG)

    def recv(self, pipe_rank: int) -> bytes:
        """Receive what :meth:`send` sends."""
        source = self.pipe_ranks[pipe_rank]
        size = torch.tensor(0)
        dist.recv(size, source, group=self.pipe_group, tag=_TAG)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, source, group=self.pipe_group, tag=_TAG)
        return payload.numpy().tobytes()

    def send_object(self, value: object, pipe_rank: int) -> None:
        """Send anything that torch.save takes to another rank of the pipe."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self.send(buffer.getvalue(), pipe_rank)

    def recv_object(self, pipe_rank: int, device: torch.device | str) -> Any:
        """Receive what :meth:`send_object` sends, with its tensors on ``device``."""
        return torch.load(io.BytesIO(self.recv(pipe_rank)), map_location=device, weights_only=False)
