"""Channels: asynchronous messages between the ranks of a pipe.

A channel is all messages from one rank to another, in the order the program fixes. On NCCL each has a process group of
its own, and so its own communicator and stream; gloo keeps the directions of a pair apart within one group, and has a
thread for each group that wakes 100 times a second, so there all channels share the pipe's.

Shapes are agreed once per stage boundary, by a header before its first message (before each message with
``dynamic_shape``). Gradients need none: both sides know the activation they belong to.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from .errors import PoisonedMessage, PRTError
from .program.placement import Placement
from .tensors import as_tuple

HEADER_SIZE = 256
"""Numbers in a header: enough for about 30 tensors."""


Boundary: TypeAlias = tuple[str, int, int]
"""Where an activation passes: the mode (``"train"`` or ``"eval"``), the stage that sends it, and the pipe."""


class TensorSpec(NamedTuple):
    """What a receiver has to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class MessageSpec(NamedTuple):
    """What a receiver has to know of an activation: one tensor, or a tuple of them."""

    is_tuple: bool
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, value: torch.Tensor | tuple[torch.Tensor, ...]) -> "MessageSpec":
        """Describe an activation."""
        return cls(not isinstance(value, torch.Tensor),
                   tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in as_tuple(value)))

    def gradients(self) -> list[TensorSpec]:
        """What comes back for it: a gradient for each tensor that requires one."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


class Receive:
    """One message on its way in: from which rank, and past which boundary, if it is an activation."""

    def __init__(self, source: int, boundary: Boundary | None, spec: MessageSpec | None) -> None:
        self.source = source
        self.boundary = boundary
        self.spec = spec
        self.tensors: list[torch.Tensor] = []
        self.poisoned = False
        self._header: tuple[torch.Tensor, dist.Work] | None = None
        self._works: list[dist.Work] = []
        self.posted = False


class _End(NamedTuple):
    """One end of a channel: its process group, and the rank of the other end in there."""

    group: dist.ProcessGroup
    peer: int


class Channels:
    """This rank's ends of all channels of its pipe.

    Every rank of the world has to construct one at the same time.

    Args:
        placement: which ranks are neighbours.
        grid: where the pipes are, and which is this rank's.
        device: where received tensors are to be.
        dynamic_shape: send a header before every activation.
    """

    def __init__(self, placement: Placement, grid: PipelineParallelGrid, device: torch.device,
                 dynamic_shape: bool) -> None:
        self._device = device
        self._dynamic_shape = dynamic_shape
        hops = {(route[stage - 1], route[stage])
                for route in placement.routes for stage in range(1, placement.stages) if placement.is_remote(stage)}
        self._outgoing: dict[int, _End] = {}
        self._incoming: dict[int, _End] = {}
        if device.type != "cpu":
            # NCCL splits the world's communicator for each group, during which nothing may be under way on it.
            get_accelerator().synchronize()
        for source, target in sorted(hops | {(target, source) for source, target in hops}):
            self._open(source, target, grid)
        self._agreed: dict[Boundary, MessageSpec] = {}
        self._expected: dict[int, deque[Receive]] = {source: deque() for source in self._incoming}
        self._sending = _Sending(pollable=device.type != "cpu")

    def _open(self, source: int, target: int, grid: PipelineParallelGrid) -> None:
        """Make a channel in every pipe; a collective over the world."""
        is_shared = dist.get_backend(grid.pp_proc_group) == "gloo"
        for ranks in grid.pipe_groups:
            group = grid.pp_proc_group if is_shared else dist.new_group([ranks[source], ranks[target]])
            if list(ranks) != list(grid.pp_group) or grid.stage_id not in (source, target):
                continue
            is_source = grid.stage_id == source
            end = _End(group, dist.get_group_rank(group, ranks[target if is_source else source]))
            if is_source:
                self._outgoing[target] = end
            else:
                self._incoming[source] = end
            if not is_shared:
                # NCCL connects at the first message, for which each end waits; later, ranks would wait in a circle.
                greeting = torch.zeros(1, device=self._device)
                (group.send if is_source else group.recv)([greeting], end.peer, 0).wait()

    def forget(self, mode: str | None = None) -> None:
        """Agree on shapes anew, in one mode (``"train"`` or ``"eval"``) or in all."""
        self._agreed = {} if mode is None else {key: spec for key, spec in self._agreed.items() if key[0] != mode}

    def send_activation(self, value: torch.Tensor | tuple[torch.Tensor, ...], spec: MessageSpec, boundary: Boundary,
                        target: int) -> MessageSpec:
        """Start to send a stage's output; returns what the receiver takes it for.

        Args:
            value: the output.
            spec: its description.
            boundary: where it passes.
            target: the receiving pipe rank.

        Raises:
            PRTError: its shape is not the agreed one.
        """
        tensors = _ready([tensor.detach() for tensor in as_tuple(value)])
        agreed = self._agreed_at(boundary)
        if agreed is None:
            self._send(_write_header(spec, self._device), target)
            self._agreed[boundary] = agreed = spec
        elif spec != agreed and not _fits(spec, agreed):
            raise PRTError(f"stage {boundary[1]} sends {_describe(spec)} but {_describe(agreed)} was "
                           "agreed in an earlier micro-batch; give PipelineModule dynamic_shape=True, make every "
                           "micro-batch alike (drop_last), or call engine.reset_activation_shape() on every rank "
                           "between batches, as after layers have been unfrozen")
        for tensor in tensors:
            self._send(tensor, target)
        return agreed

    def send_gradients(self, gradients: Sequence[torch.Tensor], target: int) -> None:
        """Start to send the gradients of a stage's input, one for each tensor that requires one."""
        for gradient in _ready(gradients):
            self._send(gradient, target)

    def send_poison(self, boundary: Boundary, target: int) -> MessageSpec | None:
        """Stand in for an activation that could not be computed, so that the channel stays in step.

        Returns what the receiver takes it for; None if the receiver learns that there is nothing.
        """
        agreed = self._agreed_at(boundary)
        if agreed is None:
            header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=self._device)
            header[0] = -1
            self._send(header, target)
            return None
        self.send_zeros(agreed.tensors, target)
        return agreed

    def send_zeros(self, tensors: Sequence[TensorSpec], target: int) -> None:
        """Send zeros of the given shapes."""
        for zeros in _ready([torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) for spec in tensors]):
            self._send(zeros, target)

    def post_activation(self, boundary: Boundary, source: int) -> Receive:
        """Post the receive of a stage's input."""
        return self._post(Receive(source, boundary, None))

    def post_gradients(self, tensors: Sequence[TensorSpec], source: int) -> Receive:
        """Post the receive of gradients."""
        return self._post(Receive(source, None, MessageSpec(True, tuple(tensors))))

    def wait(self, receive: Receive) -> list[torch.Tensor]:
        """The tensors of a message, once they are there; to be asked for once.

        Raises:
            PoisonedMessage: the sender failed.
        """
        if not receive.posted:
            self._advance(receive.source, until=receive)
        works, receive._works = receive._works, []  # gloo would wait for ever for a message that came already
        for work in works:
            work.wait()
        if receive.poisoned:
            raise PoisonedMessage
        tensors, receive.tensors = receive.tensors, []
        return tensors

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self._sending.flush()

    def _agreed_at(self, boundary: Boundary) -> MessageSpec | None:
        """What activations there are agreed to be; None where the next one needs a header."""
        return None if self._dynamic_shape else self._agreed.get(boundary)

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        group, peer = self._outgoing[target]
        # What dist.isend() does after checks that cost more than this on small messages.
        self._sending.watch(group.send([tensor], peer, 0), tensor)

    def _post(self, receive: Receive) -> Receive:
        expected = self._expected[receive.source]
        expected.append(receive)
        try:
            self._advance(receive.source, until=None)
        except BaseException:
            expected.pop()  # so that it can be posted once more: the sender has sent it only once
            raise
        return receive

    def _advance(self, source: int, until: Receive | None) -> None:
        """Post expected messages in order, as far as their shapes are known; wait for headers only up to ``until``."""
        expected = self._expected[source]
        while expected and not (until is not None and until.posted):
            head = expected[0]
            if head.spec is None and not self._learn_spec(head, may_wait=until is not None):
                return
            if head.spec is not None:
                # All before the first is received: memory may not suffice.
                head.tensors = [torch.empty(shape, dtype=dtype, device=self._device)
                                for shape, dtype, _ in head.spec.tensors]
                head._works = [self._recv(buffer, source) for buffer in head.tensors]
            head.posted = True
            expected.popleft()

    def _learn_spec(self, receive: Receive, may_wait: bool) -> bool:
        """Find out what an activation is, or that it is poisoned; returns whether that is known."""
        assert receive.boundary is not None, "of gradients it is known"
        receive.spec = self._agreed_at(receive.boundary)
        if receive.spec is not None:
            return True
        if receive._header is None:
            header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self._device)
            receive._header = header, self._recv(header, receive.source)
        if not may_wait:
            return False
        receive._header[1].wait()
        receive.spec = _read_header(receive._header[0])
        receive._header = None
        if receive.spec is None:
            receive.poisoned = True
        else:
            self._agreed[receive.boundary] = receive.spec
        return True

    def _recv(self, buffer: torch.Tensor, source: int) -> dist.Work:
        group, peer = self._incoming[source]
        return group.recv([_real(buffer)], peer, 0)


_BUNDLE = 8
"""How many sends a thread is told of together: to wait for one, it takes the interpreter from the running pass."""


class _Sending:
    """Keeps sent tensors until they have left, and not much longer.

    gloo's sends report completion only to who waits, so a thread does; NCCL's can be asked.
    """

    def __init__(self, pollable: bool) -> None:
        self._pollable = pollable
        self._flying: deque[_Sent] = deque()
        self._queue: queue.SimpleQueue[deque[_Sent] | threading.Event | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        if not pollable:
            # The thread holds no reference to this object, so that it ends with it.
            threading.Thread(target=_wait_for_all, args=(self._queue, self._errors), name="prt-sends",
                             daemon=True).start()
            weakref.finalize(self, self._queue.put, None)

    def watch(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` alive until ``work`` is done."""
        self._flying.append((work, tensor))
        if self._pollable:
            # All of them: of channels to several ranks the later send may be done first.
            self._flying = deque(sent for sent in self._flying if not sent[0].is_completed())
        elif len(self._flying) == _BUNDLE:
            self._hand_over()

    def _hand_over(self) -> None:
        self._queue.put(self._flying)
        self._flying = deque()

    def flush(self) -> None:
        """Wait for everything; raises what a send raised."""
        if self._pollable:
            while self._flying:
                self._flying.popleft()[0].wait()
        else:
            self._hand_over()
            have_left = threading.Event()
            self._queue.put(have_left)
            have_left.wait()
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error


_Sent: TypeAlias = "tuple[dist.Work, torch.Tensor]"


def _wait_for_all(bundles: "queue.SimpleQueue[deque[_Sent] | threading.Event | None]",
                  errors: list[BaseException]) -> None:
    """Wait for each send in turn and let go of its tensor, until None comes; set events that come in between."""
    while (item := bundles.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        while item:
            try:
                item[0][0].wait()
            except BaseException as error:  # whatever it is, it belongs to the thread that calls flush()
                errors.append(error)
            item.popleft()


def _ready(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is sent for tensors: made for all of them before the first is sent, as memory may not suffice."""
    return [_real(tensor.contiguous()) for tensor in tensors]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """What travels of a contiguous tensor: backends send no complex numbers, and NCCL no short integers."""
    dtype = tensor.dtype
    if dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).view(torch.uint8) if dtype == torch.int16 else tensor


def _fits(spec: MessageSpec, agreed: MessageSpec) -> bool:
    """Whether the receiver can take ``spec`` for ``agreed``: a tensor may require no gradient where one would do."""
    return spec.is_tuple == agreed.is_tuple and len(spec.tensors) == len(agreed.tensors) and all(
        new.shape == old.shape and new.dtype == old.dtype and new.requires_grad <= old.requires_grad
        for new, old in zip(spec.tensors, agreed.tensors, strict=True))


def _describe(spec: MessageSpec) -> str:
    tensors = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{' with gradient' if t.requires_grad else ''}"
               for t in spec.tensors]
    return ", ".join(tensors) if spec.is_tuple else tensors[0]


def _write_header(spec: MessageSpec, device: torch.device) -> torch.Tensor:
    numbers = [len(spec.tensors), int(spec.is_tuple)]
    for shape, dtype, requires_grad in spec.tensors:
        numbers += PipelineEngine.DTYPE_TO_ID[dtype], int(requires_grad), len(shape), *shape
    if len(numbers) > HEADER_SIZE:
        raise PRTError(f"a stage sends {len(spec.tensors)} tensors, whose shapes take {len(numbers)} numbers; only "
                       f"{HEADER_SIZE} fit into a header: send fewer tensors between layers")
    return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64, device=device)


def _read_header(header: torch.Tensor) -> MessageSpec | None:
    """The spec in a header; None if the sender failed."""
    numbers = iter(header.tolist())
    count, is_tuple = next(numbers), next(numbers)
    if count < 0:
        return None
    tensors = []
    for _ in range(count):
        dtype, requires_grad, dims = next(numbers), bool(next(numbers)), next(numbers)
        tensors.append(TensorSpec(tuple(next(numbers) for _ in range(dims)), PipelineEngine.ID_TO_DTYPE[dtype],
                                  requires_grad))
    return MessageSpec(bool(is_tuple), tuple(tensors))
