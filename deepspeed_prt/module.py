"""PRTPipelineModule: the several stages of one pipeline rank."""

import itertools
import random
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec

from .partition import cut, plan_stages
from .program.placement import DOWN, Placement

_SHOWN = ("forward_funcs", "seed_layers", "micro_offset", "_local_start", "_local_stop", "is_checkpointable_results")
"""The attributes of a module that are those of one stage while it is shown."""


class PRTPipelineModule(PipelineModule):
    """A PipelineModule cut into ``num_stages * reuse`` stages, of which each rank builds ``reuse``.

    A plain PipelineModule becomes one by itself when a config has the ``"prt"`` section. Build one directly where the
    model is too big to be built before it is known which rank gets which layer.

    ``num_stages`` (or the ``pipe`` dimension of ``topology``) is the number of pipeline ranks, as for PipelineModule.
    ``forward_funcs`` holds the layers of all the rank's stages; ``forward()`` runs those of the stage that
    :meth:`show` has named.

    Args:
        layers: as for PipelineModule, like everything not named here.
        reuse: stages per rank, or ``"auto"``.
        placement: ``"loop"`` or ``"wave"``.
        direction: ``"unidirectional"`` or ``"bidirectional"``.
        partition: the p*v + 1 stage boundaries, or None for ``partition_method``.

    Raises:
        PRTConfigError: the layers cannot be cut as asked.
    """

    placement: Placement
    layer_ids: list[int]
    parts: list[int]
    forward_funcs: list[Any]
    is_checkpointable_results: list[bool]
    is_checkpointable_results_interval: int | None
    seed_layers: bool
    micro_offset: int
    _local_start: int
    _local_stop: int

    def __init__(self, layers: Any, *args: Any, reuse: int | str = "auto", placement: str = "loop",
                 direction: str = "unidirectional", partition: list[int] | None = None, **kwargs: Any) -> None:
        # nn.Module keeps plain attributes that are set before its __init__; _partition_layers runs inside it.
        self._plan_arguments = (reuse, placement, direction, partition)
        super().__init__(layers, *args, **kwargs)

    def _partition_layers(self, method: str = "uniform") -> None:
        if hasattr(self, "parts"):
            super()._partition_layers(method)
            return
        self.parts = []
        reuse, placement, direction, partition = self._plan_arguments
        route, parts = plan_stages(self, self.num_stages, reuse, placement, direction, partition or method)
        self.set_stages(route, parts, cut(self, method, self.num_stages))

    def _count_layer_params(self) -> list[int]:
        if not hasattr(self, "_layer_params"):
            self._layer_params = super()._count_layer_params()
        return self._layer_params

    def set_stages(self, placement: Placement, parts: list[int], rank_parts: list[int]) -> None:
        """Fix which layers belong to which stage, and so which are this rank's.

        Args:
            placement: the rank of each stage.
            parts: the p*v + 1 boundaries of the stages.
            rank_parts: the p + 1 boundaries that PipelineModule would have chosen; they decide the layers' seeds.
        """
        self.placement = placement
        self.parts = parts
        self.rank_parts = rank_parts
        self.layer_ids = []
        self._ranges: dict[int, tuple[int, int]] = {}
        self._checkpointable: dict[int, list[bool]] = {}
        self._whole: dict[str, Any] = {}
        self._views: dict[int, dict[str, Any]] = {}
        for stage in placement.stages_on(self.stage_id):
            start = len(self.layer_ids)
            self.layer_ids += range(parts[stage], parts[stage + 1])
            self._ranges[stage] = (start, len(self.layer_ids))
        self._set_bounds(0, len(self.layer_ids))

    def layout(self) -> list[list[int]]:
        """The layers of each pipeline rank, in the order it holds them."""
        return [[layer for stage in self.placement.stages_on(rank)
                 for layer in range(self.parts[stage], self.parts[stage + 1])] for rank in range(self.placement.ranks)]

    def stock_layout(self) -> list[list[int]]:
        """The layers that each pipeline rank would hold with one stage."""
        return [list(range(start, stop)) for start, stop in itertools.pairwise(self.rank_parts)]

    def stage_of(self, layer_idx: int) -> int:
        """The stage that holds a layer."""
        assert 0 <= layer_idx < self._num_layers
        return bisect_right(self.parts, layer_idx, lo=1) - 1

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that holds a layer; of two copies, the one of the down pipe, which counts."""
        return self.placement.rank_of(self.stage_of(layer_idx), DOWN)

    def _build(self) -> None:
        bounds = self._local_start, self._local_stop
        for stage in self._ranges:
            self._set_bounds(self.parts[stage], self.parts[stage + 1])
            super()._build()
        self._set_bounds(*bounds)
        self._separate_tied_layers()

    def _separate_tied_layers(self) -> None:
        """Give a tied layer that is not like the first of its key here a module of its own, which shares the weights.

        PipelineModule runs the first one's module in its place.
        """
        first: dict[str, TiedLayerSpec] = {}
        for index, layer_id in enumerate(self.layer_ids):
            spec = self._layer_specs[layer_id]
            if not isinstance(spec, TiedLayerSpec):
                continue
            like = first.setdefault(spec.key, spec)
            same = (like.typename, like.module_args, like.module_kwargs) == (spec.typename, spec.module_args,
                                                                            spec.module_kwargs)
            if not same:
                self.forward_funcs[index] = self.tie(spec, layer_id, spec.build())

    def tie(self, spec: TiedLayerSpec, layer_id: int, module: torch.nn.Module) -> Any:
        """Register ``module`` as a further one of its key on this rank, sharing the tied weights; returns its call."""
        owner = self.tied_modules[spec.key]
        if module is not owner:
            for name in spec.tied_weight_attr:
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, self._recursive_getattr(owner, name))
            self.tied_modules[f"{spec.key}@{layer_id}"] = module
        return module if spec.forward_fn is None else partial(spec.forward_fn, module)

    def show(self, stage: int, micro_offset: int = 0) -> None:
        """Expose one stage to ``forward()``, and to the recomputation of checkpointed activations in a backward.

        Args:
            stage: one of this rank's stages.
            micro_offset: how many micro-batches came before this one, which seeds the layers under ``seed_layers``.
        """
        view = self._views.get(stage) or self._view(stage)
        # Past nn.Module.__setattr__, which would be a good part of the cost of a small stage.
        attributes = self.__dict__
        attributes.update(view)
        attributes["micro_offset"] = micro_offset
        if self._whole["seed_layers"]:
            # The parent would seed by the place in the stage; the seed has to be that of an uncut rank.
            start, stop = self._ranges[stage]
            attributes["forward_funcs"] = [
                partial(self._seed_and_call, function, layer_id, micro_offset)
                for function, layer_id in zip(view["forward_funcs"], self.layer_ids[start:stop], strict=True)]

    def _view(self, stage: int) -> dict[str, Any]:
        """What attributes are like while a stage is shown, until :meth:`hide`."""
        if not self._whole:
            self._whole.update((name, self.__dict__[name]) for name in _SHOWN)
        start, stop = self._ranges[stage]
        self._views[stage] = {
            "forward_funcs": self._whole["forward_funcs"][start:stop],
            "seed_layers": False,
            "_local_start": self.parts[stage],
            "_local_stop": self.parts[stage + 1],
            "is_checkpointable_results": self._checkpointable.get(stage, []),
        }
        return self._views[stage]

    def hide(self) -> None:
        """Be the module of all stages again, after any number of :meth:`show`."""
        self.__dict__.update(self._whole)
        self._whole.clear()
        self._views.clear()

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of the stage that is shown, or all that this rank has."""
        if not self._views or self.activation_checkpoint_interval != 0:
            return super().forward(forward_input)
        # What the parent comes to, which takes longer than a small stage.
        for function in self.forward_funcs:
            forward_input = function(forward_input)
        return forward_input

    def _seed_and_call(self, function: Any, layer_id: int, micro_offset: int, inputs: Any) -> Any:
        """Run a layer with the seed that PipelineModule.forward() gives it with one stage a rank.

        That is the place in the model, or, with activation checkpointing, the rank's first layer plus the place in
        the checkpointed block. PipelineModule counts the micro-batch twice, at forward() and when it seeds.
        """
        place = layer_id
        if self.activation_checkpoint_interval > 0:
            first = max(boundary for boundary in self.rank_parts[:-1] if boundary <= layer_id)
            place = first + (layer_id - first) % self.activation_checkpoint_interval
        seed = self.base_seed * (micro_offset + 2) + place
        (self.seed_fn or _set_random_seed)(seed)
        return function(inputs)

    def _precompute_checkpointable_values(self) -> None:
        if self.activation_checkpoint_interval == 0:
            return
        functions, results = self.forward_funcs, self.is_checkpointable_results
        for stage, (start, stop) in self._ranges.items():
            self.forward_funcs = functions[start:stop]
            self.is_checkpointable_results_interval = None
            super()._precompute_checkpointable_values()
            self._checkpointable[stage] = self.is_checkpointable_results
        self.forward_funcs, self.is_checkpointable_results = functions, results

    def tied_weights_used_again(self) -> dict[int, list[torch.nn.Parameter]]:
        """For each stage, the tied weights that an earlier stage of this rank uses too."""
        seen: dict[str, int] = {}
        again: dict[int, list[torch.nn.Parameter]] = {}
        for layer_id in self.layer_ids:
            spec = self._layer_specs[layer_id]
            if isinstance(spec, TiedLayerSpec) and seen.setdefault(spec.key, self.stage_of(layer_id)) \
                    != self.stage_of(layer_id):
                weights = [self._recursive_getattr(self.tied_modules[spec.key], name) for name in spec.tied_weight_attr]
                known = again.setdefault(self.stage_of(layer_id), [])
                known += [weight for weight in weights if all(weight is not other for other in known)]
        return again

    def layer_modules(self) -> list[tuple[int, torch.nn.Module]]:
        """This rank's layers that are modules, by their place in the model."""
        modules = []
        for layer_id, function in zip(self.layer_ids, self.forward_funcs, strict=True):
            is_partial = isinstance(self._layer_specs[layer_id], TiedLayerSpec) and isinstance(function, partial)
            layer = function.args[0] if is_partial else function
            if isinstance(layer, torch.nn.Module):
                modules.append((layer_id, layer))
        return modules

    def parameters_of_first_rank(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that the pipe's first rank would hold with one stage a rank; of two copies, one."""
        layered: set[int] = set()
        first: list[torch.nn.Parameter] = []
        for layer_id, layer in self.layer_modules():
            layered.update(map(id, layer.parameters()))
            if layer_id < self.rank_parts[1] and self.stage_owner(layer_id) == self.stage_id:
                first += layer.parameters()
        if self.stage_id == 0:
            first += [parameter for parameter in self.parameters() if id(parameter) not in layered]
        return list({id(parameter): parameter for parameter in first}.values())

    # Copies of weights on several ranks: of tied layers, and in both pipes

    def _tied_layers(self, key: str) -> list[int]:
        return [index for index, spec in enumerate(self._layer_specs)
                if isinstance(spec, TiedLayerSpec) and spec.key == key]

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """As in PipelineModule, with the ranks of both pipes."""
        tied_comms = {}
        for key in sorted({spec.key for spec in self._layer_specs if isinstance(spec, TiedLayerSpec)}):
            owners = sorted({self.placement.rank_of(self.stage_of(layer_id), pipe)
                             for layer_id in self._tied_layers(key) for pipe in range(self.placement.pipes)})
            for pipeline in self._topo.get_axis_comm_lists("pipe"):
                ranks = [pipeline[owner] for owner in owners]
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    tied_comms[key] = {"ranks": ranks, "group": group, "weight_attr": self.tied_weight_attrs[key],
                                       "module": self.tied_modules[key]}
        self._mark_copies()
        self._pair_ranks()
        return tied_comms

    def _mark_copies(self) -> None:
        """Let DeepSpeed's norms count each weight once: in the down pipe, and of tied layers in the first."""
        counted: set[int] = set()
        for layer_id, layer in self.layer_modules():
            spec = self._layer_specs[layer_id]
            is_first = not isinstance(spec, TiedLayerSpec) or layer_id == self._tied_layers(spec.key)[0]
            if is_first and self.stage_owner(layer_id) == self.stage_id:
                counted.update(map(id, layer.parameters()))
        for _, layer in self.layer_modules():
            for parameter in layer.parameters():
                parameter.ds_pipe_replicated = id(parameter) not in counted

    def _pair_ranks(self) -> None:
        """Make the process group of this rank and its mirror, which hold the same stages; a collective."""
        self.replica_group: Any = None
        if self.placement.pipes == 1:
            return
        for pipeline in self._topo.get_axis_comm_lists("pipe"):
            for rank in range(self.placement.ranks // 2):
                ranks = [pipeline[rank], pipeline[self.placement.mirror(rank)]]
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    self.replica_group = group

    def replicated_parameters(self) -> dict[int | None, list[torch.nn.Parameter]]:
        """For each of this rank's stages the weights whose other copy is on the mirror rank, frozen ones included.

        Those that several stages use are listed under None. Tied weights, which have copies on other ranks as well,
        are not listed.
        """
        tied = {id(weight) for weight, _ in self.get_tied_weights_and_groups()}
        weights: dict[int, torch.nn.Parameter] = {}
        stage_of: dict[int, int | None] = {}
        for layer_id, layer in self.layer_modules():
            stage = self.stage_of(layer_id)
            for parameter in layer.parameters():
                if id(parameter) not in tied:
                    weights[id(parameter)] = parameter
                    if stage_of.setdefault(id(parameter), stage) != stage:
                        stage_of[id(parameter)] = None
        stages = [*self._ranges, None]
        return {stage: [weight for key, weight in weights.items() if stage_of[key] == stage] for stage in stages}

    def _synchronize_tied_weights(self) -> None:
        """Make copies equal to the one that counts."""
        for key, comm in self.tied_comms.items():
            owner = self._grid.stage_to_global(self.stage_owner(self._tied_layers(key)[0]))
            for name in comm["weight_attr"]:
                dist.broadcast(self._recursive_getattr(comm["module"], name), src=owner, group=comm["group"])
        if self.replica_group is None:
            return
        for layer_id, layer in self.layer_modules():
            owner = self._grid.stage_to_global(self.stage_owner(layer_id))
            for tensor in itertools.chain(layer.parameters(), layer.buffers()):
                dist.broadcast(tensor.data, src=owner, group=self.replica_group)

    @contextmanager
    def copies_left_apart(self) -> Iterator[None]:
        """Leave it to the caller to make copies equal, who knows when all ranks can."""
        self.__dict__["_synchronize_tied_weights"] = lambda: None
        try:
            yield
        finally:
            del self.__dict__["_synchronize_tied_weights"]

    # Checkpoints

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save this rank's layers, of two copies the one of the down pipe; see :meth:`PipelineModule.save_state_dict`.
        """
        held = self.layer_ids, self.forward_funcs
        mine = [index for index, layer_id in enumerate(self.layer_ids) if self.stage_owner(layer_id) == self.stage_id]
        self.layer_ids, self.forward_funcs = ([of_rank[index] for index in mine] for of_rank in held)
        try:
            super().save_state_dict(*args, **kwargs)
        finally:
            self.layer_ids, self.forward_funcs = held

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of one of this rank's layers, named by the layer's place in the model as PipelineModule does."""
        return super().ckpt_layer_path(ckpt_dir, self.layer_ids[local_layer_idx] - self._local_start)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """All files of one of this rank's layers."""
        return super().ckpt_layer_path_list(ckpt_dir, self.layer_ids[local_layer_idx] - self._local_start)


def _set_random_seed(seed: int) -> None:
    """As DeepSpeed's set_random_seed, for the devices that are in use.

    torch.manual_seed() notes the call and its stack for every kind of device that is not, each time: a millisecond.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**64)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed_all(seed)
