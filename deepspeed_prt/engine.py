"""PRTPipelineEngine: plans programs, trains and evaluates batches by them, and keeps checkpoints."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed import set_optimizer_flags
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.pipe import schedule as ds

from .client import ClientParameters
from .clipping import clip_like_stock
from .config import PRTConfig, read_section
from .control import Control
from .errors import PRTError
from .gradients import add_shared_gradients, fill_missing_gradients, mark_copied_gradients, reduce_tied_gradients
from .interpreter import Interpreter
from .migration import migrate
from .module import PRTPipelineModule
from .planning import Planner
from .profile import Profile
from .program.costs import Costs
from .program.placement import DOWN, Placement
from .program.program import forward_only
from .program.simulator import simulate
from .program.sources import program_from
from .refusals import refuse_empty_norm, refuse_in_both_directions, refuse_uneven_groups, refuse_unsupported
from .replanning import Replanning
from .schedule import PRTSchedule, ReduceReplicaGrads
from .tensors import add, parts_of

_LAYOUT = "prt_layout"
"""The key of a checkpoint under which each rank's layers stand."""

_CLOSING = ds.ReduceTiedGrads, ds.ReduceGrads, ds.OptimizerStep
"""What ends a batch, once it is known that no rank has failed in it."""


class PRTPipelineEngine(Interpreter):
    """A PipelineEngine that runs several stages on each rank.

    ``deepspeed.initialize`` builds it where the config has the ``"prt"`` section. It takes what PipelineEngine takes
    and behaves like it to its user; ``is_first_stage()`` and ``is_last_stage()`` speak of the rank.

    Raises:
        PRTConfigError: the section asks for what cannot be done; on every rank, before any layer moves.
    """

    fwd_outputs: list[Any]
    total_loss: Any
    total_additional_losses: Any
    _wants_optimizer_states = False
    _has_warned = False

    def __init__(self, *args: Any, model: PRTPipelineModule, config_class: Any, optimizer: Any = None,
                 model_parameters: Any = None, **kwargs: Any) -> None:
        section = read_section(config_class._param_dict) or PRTConfig()
        refuse_unsupported(section, config_class, model)
        self._control = Control(model._grid)
        self._control.agree(refuse_in_both_directions(section, model), "looking at the model")
        self._planner = Planner(section, self._control)
        self._schedules: dict[tuple[int, bool], PRTSchedule] = {}

        def check(placement: Placement) -> None:
            self.placement = self._planner.placement = placement
            self._planner.program(config_class.gradient_accumulation_steps)

        if isinstance(model, PRTPipelineModule):
            check(model.placement)
        else:
            client = ClientParameters(model_parameters, optimizer)
            wrapped = (config_class.zero_optimization_stage == 1 or config_class.bfloat16_config.enabled
                       or config_class.float16_config.enabled)
            migrate(model, section, client, self._control, check, every_rank_trains=wrapped)
            model_parameters = client.model_parameters
            set_optimizer_flags(config_class, model)
        super().__init__(*args, model=model, config_class=config_class, optimizer=optimizer,
                         model_parameters=model_parameters, **kwargs)
        groups = self._control.gather(0 if self.optimizer is None else len(self.optimizer.param_groups))
        self._control.agree(refuse_uneven_groups(self, groups) or refuse_empty_norm(self), "looking at the optimizer")
        self._loss_rank = self.placement.rank_of(self._last_stage, DOWN)
        self._replanning = Replanning(self._planner, self._control, partial(Profile, self.device))
        if self.global_rank == 0:
            # As PipelineModule says how it partitions; DeepSpeed's logger shows warnings only.
            print(self._describe_plan(), flush=True)

    # Programs

    def _train_schedule(self) -> PRTSchedule:
        return self._listed(self.micro_batches, evaluate=False)

    def _inference_schedule(self, micro_batches: int) -> PRTSchedule:
        return self._listed(micro_batches, evaluate=True)

    def _listed(self, micro_batches: int, evaluate: bool) -> PRTSchedule:
        key = micro_batches, evaluate
        if key not in self._schedules:
            if evaluate:
                # Copies are equal, so the down pipe's will do, and all results come in order on one rank.
                down = replace(self.placement, direction="unidirectional")
                program = forward_only(program_from("auto", down, micro_batches, split=False))
            else:
                program = self._planner.program(micro_batches)
            self._schedules[key] = PRTSchedule(micro_batches, self.num_stages, self.stage_id, program=program)
        return self._schedules[key]

    def _describe_plan(self) -> str:
        program = self._train_schedule().program
        timeline = simulate(program, Costs.uniform(self.placement))
        ways = ", in both directions" if self.placement.pipes == 2 else ""
        return (f"deepspeed_prt: {self.num_stages} ranks x {self.placement.reuse} stages = {self.placement.stages} "
                f"stages in a {self.placement.name}{ways}, schedule {program.schedule}, {self.micro_batches} "
                f"micro-batches, predicted bubble {100 * timeline.bubble_fraction:.1f} %, at most {program.peak:g} "
                "micro-batches in flight per rank")

    @property
    def measured_costs(self) -> Costs | None:
        """What the stages take, in milliseconds, once batches have been measured."""
        return self._planner.costs

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self._loss_rank)

    @contextmanager
    def _loss_rank_as_last(self) -> Iterator[None]:
        """Let the parent take the rank that computes the loss for the last one."""
        self._last_stage_rank = self._loss_rank
        try:
            yield
        finally:
            self._last_stage_rank = None

    # A batch

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Train one batch; see :meth:`PipelineEngine.train_batch`.

        Raises:
            StopIteration: on every rank, if the data iterator of one ends; nothing has been sent then.
            RankFailedError: another rank failed inside the batch; no rank has stepped.
        """
        self._mode = "train"
        program = self._train_schedule().program
        self._profile = self._replanning.profile(program)
        try:
            loss = super().train_batch(data_iter)
        finally:
            self._profile = None
        if self._replanning.batch_trained(program):
            self._schedules = {key: listed for key, listed in self._schedules.items() if key[1]}
        return loss

    def eval_batch(self, data_iter: Any, return_logits: bool = False, compute_loss: bool = True,
                   reduce_output: str | None = 'avg', bcast_loss: bool = True,
                   num_micro_batches: int | None = None) -> Any:
        """Evaluate one batch; see :meth:`PipelineEngine.eval_batch`. Results arrive on the last rank.

        Raises:
            ValueError: ``reduce_output=None`` with a loss to broadcast.
        """
        is_broadcast = compute_loss and (bcast_loss or self.monitor.enabled)
        if reduce_output is None and is_broadcast:
            raise ValueError("eval_batch(reduce_output=None) returns a list of losses, which cannot be broadcast (a "
                             "monitor needs that as well): pass bcast_loss=False, or reduce_output='avg'")
        self._mode = "eval"
        # Evaluation batches may have shapes of their own each time.
        self._channels.forget("eval")
        train_iterator = self.data_iterator
        try:
            # The parent hands the iterator to the first and last rank, and asks the loss rank for the loss.
            self.set_dataiterator(data_iter)
            with self._loss_rank_as_last():
                result = super().eval_batch(data_iter, return_logits, compute_loss, reduce_output, bcast_loss,
                                            num_micro_batches)
        finally:
            self.set_dataiterator(train_iterator)
            self.eval_return_logits = False
        return self._hand_to_last_rank(result, return_logits, is_broadcast)

    def _hand_to_last_rank(self, result: Any, with_logits: bool, is_broadcast: bool) -> Any:
        """Where the loss is not computed on the last rank, bring it there, with the logits."""
        last = self.num_stages - 1
        if self._loss_rank == last or (is_broadcast and not with_logits):
            return result
        if self.stage_id == self._loss_rank:
            self._control.send_object(result, last)
            loss = result[0] if with_logits else result
            nothing = loss if is_broadcast else None
            return (nothing, None) if with_logits else nothing
        if self.stage_id == last:
            return self._control.recv_object(self._loss_rank, self.device)
        return result

    def _exec_schedule(self, pipe_schedule: PRTSchedule) -> None:
        """Read the batch, run the program, and let gradients be used only if no rank has failed."""
        instructions = list(itertools.chain.from_iterable(pipe_schedule.steps()))
        computing = [instruction for instruction in instructions if not isinstance(instruction, _CLOSING)]
        closing = [instruction for instruction in instructions if isinstance(instruction, _CLOSING)]
        if closing:
            computing.append(ReduceReplicaGrads(stage=None))
        self.fwd_outputs = []
        self._begin_batch(pipe_schedule)
        try:
            failure: Exception | None = None
            try:
                self._read_batch(pipe_schedule.micro_batches)
            except Exception as error:
                failure = error
            confirm = self._control.start_agreeing(failure, "reading a batch")
            if self._profile is not None:
                self._profile.start_batch()
            failure, failed_at = self._execute(computing, confirm)
            self._channels.flush()
            self._lacking_somewhere = self._control.agree(failure, f"computing {self._mode} batch {self.global_steps}",
                                                          failed_at, flag=self._replicas.lacks_gradients)
            if self._profile is not None:
                self._profile.finish_batch()
        except BaseException:
            self._discard_batch()
            raise
        finally:
            self._end_batch()
        # Nothing that closes a batch needs the losses, and they need not wait for it.
        finish_sharing = self._start_sharing_losses(pipe_schedule.micro_batches) if closing else None
        for instruction in closing:
            self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)
        if finish_sharing is not None:
            finish_sharing()
        self._collect_losses()

    def _start_sharing_losses(self, micro_batches: int) -> Callable[[], None] | None:
        """Start to bring the losses that the last stages of two pipes computed together, on both their ranks.

        Returns what finishes it; None where there is nothing to share.
        """
        if self.placement.pipes == 1 or not self._losses or micro_batches == 1:
            return None
        like, like_additional = next(iter(self._losses.values()))
        names = list(like_additional or {})
        own = {micro_batch: torch.stack([part.reshape(()) for part in (*parts_of(loss), *(additional or {}).values())])
               for micro_batch, (loss, additional) in self._losses.items()}
        row = next(iter(own.values()))
        table = torch.stack([own.get(micro_batch, torch.zeros_like(row)) for micro_batch in range(micro_batches)])
        work = torch.distributed.all_reduce(table, group=self.module.replica_group, async_op=True)

        def finish() -> None:
            work.wait()
            for micro_batch, values in enumerate(table.unbind()):
                if micro_batch not in self._losses:
                    parts = [value.reshape(part.shape) for value, part in zip(values, parts_of(like), strict=False)]
                    additional = dict(zip(names, values[len(parts):], strict=True)) if names else like_additional
                    self._losses[micro_batch] = parts[0] if torch.is_tensor(like) else parts, additional

        return finish

    def _collect_losses(self) -> None:
        """Sum losses and list outputs in micro-batch order, whichever order they were computed in."""
        for _, (loss, additional) in sorted(self._losses.items(), key=lambda item: item[0]):
            self.fwd_outputs.append(loss)
            if self._mode == "eval":
                continue
            self.total_loss = add(self.total_loss, loss)
            if additional is not None:
                if self.total_additional_losses is None:
                    self.total_additional_losses = OrderedDict()
                for name, value in additional.items():
                    self.total_additional_losses[name] = add(self.total_additional_losses.get(name), value)
        self._losses.clear()

    def _aggregate_total_loss(self) -> torch.Tensor:
        with self._loss_rank_as_last():
            return super()._aggregate_total_loss()

    # What closes a batch

    def _exec_reduce_tied_grads(self) -> None:
        add_shared_gradients(self._tied_again, self._shared_gradients)
        self._replicas.finish(self._lacking_somewhere, self._control)
        self._replica_norms.combine(self._schedule.micro_batches)
        reduce_tied_gradients(self.module, self.optimizer)
        if self.placement.pipes == 2:
            mark_copied_gradients(self.module, self.optimizer)

    def _exec_reduce_grads(self) -> None:
        if self.is_data_parallel and not self.using_bf16_optimizer and isinstance(self.optimizer, ZeROOptimizer):
            fill_missing_gradients(self.optimizer)
        super()._exec_reduce_grads()

    def allreduce_and_copy(self, small_bucket: list[torch.Tensor], dp_group: Any,
                           dp_world_size: int | None = None) -> None:
        """Average gradients over the replicas; where there is one, nothing is copied to and fro."""
        is_alone = (not self.is_data_parallel and self.gradient_predivide_factor() == 1
                    and all(gradient.dtype == self.communication_data_type for gradient in small_bucket))
        if not is_alone:
            super().allreduce_and_copy(small_bucket, dp_group, dp_world_size)

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm that the stock engine uses."""
        clip_like_stock(self.module, self.gradient_clipping(), self.mpu)

    # Checkpoints

    def save_checkpoint(self, save_dir: str, tag: Any = None, client_state: dict[str, Any] | None = None,
                        save_latest: bool = True, exclude_frozen_parameters: bool = False) -> bool:
        """Save; the files are the stock engine's. Which rank holds which layers is noted beside the optimizer state."""
        if self.optimizer is not None and self.global_rank == 0 and not self._has_warned \
                and self.module.layout() != self.module.stock_layout():
            self._has_warned = True
            print("deepspeed_prt: optimizer state is saved rank by rank, and ranks hold other layers than without the "
                  '"prt" section; to go on from this checkpoint without it, pass load_optimizer_states=False to '
                  "load_checkpoint: DeepSpeed would load the state of other layers without a word", flush=True)
        return super().save_checkpoint(save_dir, tag, {**(client_state or {}), _LAYOUT: self.module.layout()},
                                       save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir: str, tag: Any = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False, custom_load_fn: Any = None) -> tuple[Any, Any]:
        """Load a checkpoint of any layout; optimizer state only where every rank had the layers it has now.

        Raises:
            PRTError: optimizer state was asked for, but belongs to other layers; on every rank, nothing is loaded.
        """
        self._wants_optimizer_states = load_optimizer_states and not load_module_only
        path, client_state = super().load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states,
                                                     load_lr_scheduler_states, load_module_only, custom_load_fn)
        if client_state is not None:
            client_state.pop(_LAYOUT, None)
        return path, client_state

    def load_module_state_dict(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Called between reading a checkpoint and loading the optimizer state in it."""
        error: Exception | None = None
        if self._wants_optimizer_states and self.optimizer is not None:
            is_same_size = checkpoint["mp_world_size"] == self.mp_world_size
            saved = checkpoint.get(_LAYOUT, self.module.stock_layout() if is_same_size else None)
            mine = self.module.layout()
            if saved != mine:
                rank = self.stage_id
                theirs = "another number of ranks" if saved is None or len(saved) != len(mine) \
                    else f"layers {saved[rank]} on rank {rank}"
                error = PRTError(f"the checkpoint's optimizer state is of {theirs}, but rank {rank} now holds layers "
                                 f"{mine[rank]}; load it with the reuse, placement and ranks it was saved with, or "
                                 "pass load_optimizer_states=False to load_checkpoint")
        self._control.agree(error, "loading a checkpoint")
        try:
            with self.module.copies_left_apart():
                super().load_module_state_dict(checkpoint, *args, **kwargs)
        except Exception as caught:
            error = caught
        self._control.agree(error, "loading layers")
        self.module._synchronize_tied_weights()

    def reset_activation_shape(self) -> None:
        """Agree on the shapes between stages anew, at the next batch; to be called on every rank."""
        super().reset_activation_shape()
        self._channels.forget()

    _INSTRUCTION_MAP: dict[type, Callable] = {
        **Interpreter._INSTRUCTION_MAP,
        ds.ReduceTiedGrads: _exec_reduce_tied_grads,
        ds.ReduceGrads: _exec_reduce_grads,
    }
