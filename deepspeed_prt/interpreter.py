"""The executing interpreter: each instruction of a program, on real tensors."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import maybe_loss_for_backward
from torch.autograd.graph import GradientEdge

from . import schedule
from .channels import Boundary, Channels, MessageSpec, Receive
from .errors import PoisonedMessage, PRTError
from .loading import BatchReader, LoadingAhead
from .profile import Profile
from .program.placement import Placement
from .replicas import ReplicaNorms, Replicas
from .schedule import PRTSchedule
from .split_backward import Deferred, SplitBackward, accumulate
from .tensors import Tensors, as_tuple, detach, edge_of, enter_stage, fit_to_be_sent, gradients_of, run_backward

_NOTHING = nullcontext()

_BEFORE_MESSAGES = schedule.LoadMicroBatch, schedule.ForwardPass
"""What a rank with data of its own can do before any message."""


class _Output(NamedTuple):
    """What a stage's backward needs of its output: where gradients enter, by position, and who took it for what."""

    edges: dict[int, GradientEdge]
    spec: MessageSpec


class Interpreter(PipelineEngine):
    """A PipelineEngine that executes the instructions of a :class:`PRTSchedule`, all but those that close a batch."""

    placement: Placement
    _mode = "train"
    _schedule: PRTSchedule
    _profile: Profile | None = None
    _active_stage: int | None = None
    _last_stage_rank: int | None = None
    _is_plain = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channels = Channels(self.placement, self.grid, self.device, self.dynamic_shape)
        self._last_stage = self.placement.stages - 1
        self._reader = BatchReader()
        self._batch: list[Any] = []
        self._losses: dict[int, tuple[Any, dict[str, Any] | None]] = {}
        self._shared_gradients: dict[tuple[int, int], torch.Tensor | None] = {}
        self._tied_again = self.module.tied_weights_used_again()
        self._replicas = Replicas(self.module, self.optimizer, self._config.zero_config.reduce_bucket_size)
        self._replica_norms = ReplicaNorms(self.module)
        self._split_backward = SplitBackward()
        self._loading_ahead = None if self.device.type == "cpu" else LoadingAhead(self.device)
        for key in ("grads", "losses", "receives", "deferred"):
            self.pipe_buffers[key] = []

    # Where a stage is meant, not the rank

    def is_first_stage(self) -> bool:
        """Whether this is the first rank; while a stage executes, whether that is the first stage."""
        return self.stage_id == 0 if self._active_stage is None else self._active_stage == 0

    def is_last_stage(self) -> bool:
        """Whether this is the last rank; while a stage executes, whether that is the last stage."""
        if self._active_stage is not None:
            return self._active_stage == self._last_stage
        return self.stage_id == (self.num_stages - 1 if self._last_stage_rank is None else self._last_stage_rank)

    def _rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that runs a stage for a micro-batch of this schedule."""
        return self._routes[micro_batch][stage]

    def _boundary(self, sender: int, micro_batch: int) -> Boundary:
        return self._mode, sender, self._pipes[micro_batch]

    def _enter(self, stage: int, micro_batch: int) -> None:
        """Let this engine and its module be those of one stage, until the next one or the end of the batch."""
        self.__dict__["_active_stage"] = stage  # past nn.Module.__setattr__, as in PRTPipelineModule.show()
        self.module.show(stage, self._first_micro_offset + micro_batch)

    def _has_nothing_around_passes(self) -> bool:
        """Whether all that DeepSpeedEngine does before and after a forward or backward is without effect.

        It costs more than a small stage's compute.
        """
        return not (isinstance(self.optimizer, ZeROOptimizer) or self.engine_timers.active_timers()
                    or self.memory_breakdown() or self.autotuning_profile_model_info() or self.is_deepcompile_enabled()
                    or self._is_compiled_autograd_enabled or self.fp16_auto_cast() or self.torch_autocast_enabled()
                    or torch.is_autocast_enabled(self.device.type) or self.random_ltd_enabled())

    def _create_module_forward_pre_hook(self) -> None:
        """No hook, but :meth:`_full_forward`: with any, calling the module costs more than a small stage's compute."""

    def _create_module_forward_post_hook(self) -> None:
        """As for the hook before."""

    def _full_forward(self, inputs: Tensors) -> Any:
        """What DeepSpeedEngine does in a forward, and in the hooks that it has on its module."""
        changed = self._forward_prologue((inputs, ), {})
        outputs = DeepSpeedEngine.forward(self, inputs if changed is None else changed[0][0])
        self._forward_epilogue()
        return outputs

    def _backward_prologue_per_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        # The loss is scaled before its backward; gradients between stages are scaled already.
        return grad

    # A batch

    def _begin_batch(self, pipe_schedule: PRTSchedule) -> None:
        """Get ready to execute a batch."""
        self._schedule = pipe_schedule
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self._losses.clear()
        placement = pipe_schedule.program.placement
        self._pipes = [placement.pipe_of(micro_batch) for micro_batch in range(pipe_schedule.micro_batches)]
        self._routes = [placement.routes[pipe] for pipe in self._pipes]
        self._is_plain = self._has_nothing_around_passes()
        if self._is_plain:
            self._forward_prologue((), {})  # starts the throughput timer
        self._first_micro_offset = self.module.micro_offset
        self._replica_norms.begin()

    def _execute(self, instructions: Iterable[ds.PipeInstruction],
                 confirm: Callable[[], object]) -> tuple[Exception | None, float]:
        """Execute instructions; returns what failed, and when. What follows a failure is finished without computing.

        Args:
            instructions: of this rank, in order.
            confirm: raises if there is to be no batch; called before the first message is sent or expected, so that a
                rank with data of its own computes meanwhile.
        """
        handlers = self._INSTRUCTION_MAP
        failure: Exception | None = None
        failed_at = 0.0
        is_confirmed = False
        with self._splitting_backwards():
            for instruction in instructions:
                if not is_confirmed and not isinstance(instruction, _BEFORE_MESSAGES):
                    confirm()
                    is_confirmed = True
                if failure is None:
                    try:
                        handlers[type(instruction)](self, **instruction.kwargs)
                    except Exception as error:
                        failure, failed_at = error, time.time()
                        if isinstance(error, torch.OutOfMemoryError):
                            traceback.clear_frames(error.__traceback__)  # which hold what the failed pass computed
                        self._let_go_of_activations()
                        self._finish_without_computing(instruction)
                else:
                    self._finish_without_computing(instruction)
            if not is_confirmed:
                confirm()
        return failure, failed_at

    def _end_batch(self) -> None:
        """Be this rank again, after a batch that went well or did not."""
        self._active_stage = None
        self.module.hide()
        self.module.micro_offset = self._first_micro_offset + self._schedule.micro_batches
        self._batch = []
        if self._loading_ahead is not None:
            self._loading_ahead.forget()

    def _read_batch(self, micro_batches: int) -> None:
        """Read all micro-batches before any communication: user code may communicate inside its iterator."""
        if self.stage_id not in (0, self.num_stages - 1):
            return
        # What runs in there may ask for the first and last rank.
        last_stage_rank, self._last_stage_rank = self._last_stage_rank, None
        try:
            # An iterator for evaluation is usually new, and not to be held on to.
            reader = self._reader if self._mode == "train" else BatchReader()
            self._batch = reader.read(self.data_iterator, partial(PipelineEngine._next_batch, self), micro_batches)
        finally:
            self._last_stage_rank = last_stage_rank

    def _next_batch(self) -> Any:
        """What the parent loads; on the device already, if that is not the CPU."""
        stage, micro_batch = self._loading
        if self._loading_ahead is None:
            return self._batch[micro_batch]
        self._loading_ahead.start((stage, micro_batch), self._needed(stage, micro_batch))
        needed = self._loading_ahead.take((stage, micro_batch))
        following = micro_batch + self.placement.pipes
        if following < len(self._batch):
            self._loading_ahead.start((stage, following), self._needed(stage, following))
        return needed

    def _needed(self, stage: int, micro_batch: int) -> tuple[Any, Any]:
        """Of inputs and labels, those that a stage uses."""
        batch = self._batch[micro_batch]
        return batch[0] if stage == 0 else None, batch[1] if stage == self._last_stage else None

    # Instructions

    def _exec_load_micro_batch(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        self._loading = stage, micro_batch
        self._enter(stage, micro_batch)
        super()._exec_load_micro_batch(buffer_id)

    def _exec_forward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        buffers = self.pipe_buffers
        inputs = self._take_inputs(buffer_id)
        if self._profile is not None:
            self._profile.begin("F", stage)
        self._enter(stage, micro_batch)
        outputs = self.module(inputs) if self._is_plain else self._full_forward(inputs)
        # Activation checkpointing keeps state of a training forward, which evaluation has no use for.
        if not self.module.training:
            ds_checkpointing.reset()
            buffers['inputs'][buffer_id] = None
        if stage == self._last_stage:
            self._compute_micro_batch_loss(buffer_id, micro_batch, outputs)
            return
        if not _is_made_of_tensors(outputs, tuple):
            raise PRTError(f"stage {stage} returns {_describe(outputs)}; the layer at the end of a stage has to return "
                           'a tensor or a tuple of tensors; set "partition" to boundaries between layers that do, or '
                           'lower "reuse"')
        if torch.is_grad_enabled():
            edges = {index: edge_of(tensor) for index, tensor in enumerate(as_tuple(outputs))
                     if tensor.requires_grad}
            buffers['output_tensors'][buffer_id] = _Output(edges, MessageSpec.of(outputs))
        if self.placement.is_remote(stage + 1):
            buffers['outputs'][buffer_id] = fit_to_be_sent(outputs, inputs)
        else:
            # A copy, as between ranks: the next layer may work in place.
            copies = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad)
                           for tensor in as_tuple(outputs))
            buffers['inputs'][self._schedule.buffer_of(stage + 1, micro_batch)] = \
                copies[0] if torch.is_tensor(outputs) else copies

    def _take_inputs(self, buffer_id: int) -> Tensors:
        """A stage's inputs: loaded, received or left by the stage below, fit to be changed in place."""
        receive: Receive | None = self.pipe_buffers['receives'][buffer_id]
        if receive is not None:
            tensors = self._wait(receive)
            assert receive.spec is not None
            for tensor, spec in zip(tensors, receive.spec.tensors, strict=True):
                tensor.requires_grad_(spec.requires_grad)
            self.pipe_buffers['inputs'][buffer_id] = tuple(tensors) if receive.spec.is_tuple else tensors[0]
            if self._mode == "eval":
                self.pipe_buffers['receives'][buffer_id] = None
        return enter_stage(self.pipe_buffers['inputs'][buffer_id])

    def _wait(self, receive: Receive) -> list[torch.Tensor]:
        """A message that a pass needs; the time until it is there is no part of any pass."""
        if self._profile is not None:
            self._profile.end()
        return self._channels.wait(receive)

    def _compute_micro_batch_loss(self, buffer_id: int, micro_batch: int, outputs: Any) -> None:
        labels = self.pipe_buffers['labels'][buffer_id]
        self.pipe_buffers['labels'][buffer_id] = None
        if self._compute_loss and self.module.loss_fn is not None:
            self.loss = self.module.loss_fn(outputs, labels)
            if not _is_made_of_tensors(self.loss, tuple | list):
                raise PRTError(f"loss_fn returns {_describe(self.loss)}; it has to return a tensor (or several, in a "
                               "tuple or list), with its graph: no .item() and no .detach()")
        else:
            # Some models return the loss themselves.
            self.loss = outputs
        if self.eval_return_logits:
            self.outputs = outputs
        additional = self.module.get_additional_losses()
        self._losses[micro_batch] = detach(self.loss), None if additional is None else {
            name: detach(value) for name, value in additional.items()
        }
        if torch.is_grad_enabled():
            self.pipe_buffers['losses'][buffer_id] = self.loss
        self.loss = None

    def _splitting_backwards(self) -> AbstractContextManager[None]:
        """Have the layers of stages that split their backwards defer their weight gradients."""
        split_stages = self._schedule.program.split_stages
        if not split_stages:
            return _NOTHING
        return self._split_backward.installed([layer for layer_id, layer in self.module.layer_modules()
                                               if self.module.stage_of(layer_id) in split_stages],
                                              [weight for weight, _ in self.module.get_tied_weights_and_groups()])

    def _exec_backward_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        self._exec_input_grad_pass(buffer_id, stage, micro_batch)
        self._exec_weight_grad_pass(buffer_id, stage, micro_batch)

    def _exec_input_grad_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        """All of the backward but what the layers defer; everything, in a stage that is not split."""
        assert self.optimizer is not None, "must provide optimizer during init in order to use backward"
        buffers = self.pipe_buffers
        output: _Output | None = buffers['output_tensors'][buffer_id]
        gradients = buffers['grads'][buffer_id]
        if isinstance(gradients, Receive):
            gradients = self._wait(gradients)
        if self._profile is not None:
            self._profile.begin("I", stage)
        separate = self._separate_gradients(stage) if stage in self._tied_again else _NOTHING
        buffers['deferred'][buffer_id] = self._split_backward.collect()
        self._enter(stage, micro_batch)
        with separate:
            if stage == self._last_stage:
                loss = buffers['losses'][buffer_id]
                buffers['losses'][buffer_id] = None
                self._backward_from_loss(loss)
                del loss
            else:
                assert output is not None
                self._backward_from(output, gradients)
        self._split_backward.collect()  # what layers differentiate in their forwards is nobody's
        buffers['output_tensors'][buffer_id] = buffers['grads'][buffer_id] = None
        if stage == 0:
            buffers['inputs'][buffer_id] = None
        elif not self.placement.is_remote(stage):
            inputs = as_tuple(buffers['inputs'][buffer_id])
            buffers['inputs'][buffer_id] = None
            buffers['grads'][self._schedule.buffer_of(stage - 1, micro_batch)] = gradients_of(inputs)

    def _exec_weight_grad_pass(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        if self._profile is not None:
            self._profile.begin("W", stage)
        deferred: list[Deferred] = self.pipe_buffers['deferred'][buffer_id]
        self.pipe_buffers['deferred'][buffer_id] = None
        if deferred:
            with self._engine_backward():
                accumulate(deferred, None if self._is_plain else self._backward_prologue)

    def _backward_from_loss(self, loss: Any) -> None:
        if self._is_plain and maybe_loss_for_backward(loss):
            torch.autograd.backward(loss / self.gradient_accumulation_steps())
        else:
            DeepSpeedEngine.backward(self, loss)

    def _backward_from(self, output: _Output, gradients: Sequence[torch.Tensor]) -> None:
        """Back-propagate the gradients of a stage's output, all tensors together."""
        expected = [index for index, tensor in enumerate(output.spec.tensors) if tensor.requires_grad]
        pairs = [(output.edges[index], gradient) for index, gradient in zip(expected, gradients, strict=True)
                 if index in output.edges]
        if not pairs:
            return
        # The hooks that DeepSpeed put on the outputs run the prologue.
        with self._engine_backward():
            run_backward(*zip(*pairs, strict=True))

    def _engine_backward(self) -> AbstractContextManager[None]:
        """What DeepSpeedEngine.backward() does around a backward, but for its prologue."""
        return _NOTHING if self._is_plain else self._full_engine_backward()

    @contextmanager
    def _full_engine_backward(self) -> Iterator[None]:
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads(set_to_none=True)
        self.__dict__["_running_engine_backward"] = True
        try:
            yield
        finally:
            self.__dict__["_running_engine_backward"] = False
        self._backward_epilogue()

    @contextmanager
    def _separate_gradients(self, stage: int) -> Iterator[None]:
        """Sum the gradients of a tied weight per stage, as on different ranks, where stages of one rank share it."""
        weights = [] if isinstance(self.optimizer, ZeROOptimizer) else self._tied_again[stage]
        others = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = self._shared_gradients.get((stage, id(weight)))
        yield
        for weight, other in zip(weights, others, strict=True):
            self._shared_gradients[stage, id(weight)] = weight.grad
            weight.grad = other

    def _exec_send_activations(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        outputs = self.pipe_buffers['outputs'][buffer_id]
        self.pipe_buffers['outputs'][buffer_id] = None
        output: _Output | None = self.pipe_buffers['output_tensors'][buffer_id]
        spec = MessageSpec.of(outputs) if output is None else output.spec
        agreed = self._channels.send_activation(outputs, spec, self._boundary(stage, micro_batch),
                                                self._rank_of(stage + 1, micro_batch))
        if output is not None and agreed != spec:
            self.pipe_buffers['output_tensors'][buffer_id] = output._replace(spec=agreed)

    def _exec_recv_activations(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        self.pipe_buffers['receives'][buffer_id] = self._channels.post_activation(
            self._boundary(stage - 1, micro_batch), self._rank_of(stage - 1, micro_batch))

    def _exec_send_grads(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        gradients = gradients_of(as_tuple(self.pipe_buffers['inputs'][buffer_id]))
        self._channels.send_gradients(gradients, self._rank_of(stage - 1, micro_batch))
        self.pipe_buffers['inputs'][buffer_id] = self.pipe_buffers['receives'][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        output: _Output = self.pipe_buffers['output_tensors'][buffer_id]
        self.pipe_buffers['grads'][buffer_id] = self._channels.post_gradients(
            output.spec.gradients(), self._rank_of(stage + 1, micro_batch))

    def _exec_reduce_replica_grads(self, stage: int) -> None:
        self._replicas.start(stage)

    # A batch that failed

    def _finish_without_computing(self, instruction: ds.PipeInstruction) -> None:
        """Keep the channels in step after a failure, so that every other rank gets to the end of the batch.

        Sends send zeros, or say that there is nothing; receives are waited for; nothing is computed.
        """
        kind = type(instruction)
        if kind is schedule.ReduceReplicaGrads:
            self._replicas.start(instruction.stage, failed=True)
            return
        buffer_id, stage, micro_batch = instruction.kwargs.values()
        buffers, channels = self.pipe_buffers, self._channels
        if kind is schedule.RecvActivation:
            if buffers['receives'][buffer_id] is None:
                self._exec_recv_activations(buffer_id, stage, micro_batch)
        elif kind is schedule.ForwardPass:
            self._absorb(buffers['receives'][buffer_id])
            if self._mode == "eval":
                buffers['receives'][buffer_id] = None
            buffers['output_tensors'][buffer_id] = None
        elif kind is schedule.SendActivation:
            spec = channels.send_poison(self._boundary(stage, micro_batch), self._rank_of(stage + 1, micro_batch))
            buffers['output_tensors'][buffer_id] = None if spec is None else _Output({}, spec)
        elif kind is schedule.RecvGrad:
            if buffers['grads'][buffer_id] is None and buffers['output_tensors'][buffer_id] is not None:
                self._exec_recv_grads(buffer_id, stage, micro_batch)
        elif kind in (schedule.BackwardPass, schedule.InputGradPass):
            self._absorb(buffers['grads'][buffer_id])
            buffers['output_tensors'][buffer_id] = buffers['grads'][buffer_id] = None
        elif kind is schedule.SendGrad:
            receive: Receive | None = buffers['receives'][buffer_id]
            buffers['receives'][buffer_id] = None
            if receive is not None and receive.spec is not None:
                channels.send_zeros(receive.spec.gradients(), self._rank_of(stage - 1, micro_batch))

    def _let_go_of_activations(self) -> None:
        """Make room for what is still to be received."""
        buffers = self.pipe_buffers
        for key in ("inputs", "outputs", "labels", "losses", "deferred"):
            buffers[key][:] = [None] * len(buffers[key])
        buffers["output_tensors"][:] = [output and output._replace(edges={}) for output in buffers["output_tensors"]]

    def _absorb(self, message: Any) -> None:
        if isinstance(message, Receive) and not message.poisoned:
            # It may be poisoned as well; the failure that counts is known already.
            with suppress(PoisonedMessage):
                self._channels.wait(message)

    def _discard_batch(self) -> None:
        """Forget everything of a batch that failed: activations, gradients and timers that still run."""
        for timer in self.timers.timers.values():
            if timer.started_:
                timer.reset()
        for slots in self.pipe_buffers.values():
            slots[:] = [None] * len(slots)
        self._losses.clear()
        self._shared_gradients.clear()
        if self._profile is not None:
            self._profile.forget_batch()
            self._profile = None
        self._replicas.discard()
        self._replica_norms.discard()
        self.loss = None
        if self._mode == "train" and self.optimizer is not None:
            self.optimizer.zero_grad()
            while isinstance(self.optimizer, ZeROOptimizer) and self.optimizer._backward_active_depth > 0:
                self.optimizer.exit_backward()

    _INSTRUCTION_MAP: dict[type, Callable] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.InputGradPass: _exec_input_grad_pass,
        schedule.WeightGradPass: _exec_weight_grad_pass,
        schedule.ReduceReplicaGrads: _exec_reduce_replica_grads,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
    }


def _is_made_of_tensors(value: Any, several: Any) -> bool:
    """Whether a value is a tensor, or ``several`` of them."""
    return torch.is_tensor(value) or (isinstance(value, several) and all(map(torch.is_tensor, value)))


def _describe(value: Any) -> str:
    kind = type(value).__name__
    members = f" of {', '.join(type(member).__name__ for member in value)}" if isinstance(value, tuple | list) else ""
    return f"a {kind}{members}"
