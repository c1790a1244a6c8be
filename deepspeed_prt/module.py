"""PRTPipelineModule: the several stages of one pipeline rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import set_random_seed

from .partition import cut, plan_stages
from .program.placement import Placement


class PRTPipelineModule(PipelineModule):
    """A PipelineModule cut into ``num_stages * reuse`` stages, of which each rank builds ``reuse``.

    A plain PipelineModule becomes one by itself when a config has the ``"prt"`` section. Build one directly where the
    model is too big to be built before it is known which rank gets which layer.

    ``num_stages`` (or the ``pipe`` dimension of ``topology``) is the number of pipeline ranks, as for PipelineModule.
    ``forward_funcs`` holds the layers of all the rank's stages; ``forward()`` runs those of the stage that
    :meth:`executing` names.

    Args:
        layers: as for PipelineModule, like everything not named here.
        reuse: stages per rank, or ``"auto"``.
        placement: ``"loop"`` or ``"wave"``.
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
                 partition: list[int] | None = None, **kwargs: Any) -> None:
        # nn.Module keeps plain attributes that are set before its __init__; _partition_layers runs inside it.
        self._plan_arguments = (reuse, placement, partition)
        super().__init__(layers, *args, **kwargs)

    def _partition_layers(self, method: str = "uniform") -> None:
        if hasattr(self, "parts"):
            super()._partition_layers(method)
            return
        self.parts = []
        reuse, placement, partition = self._plan_arguments
        route, parts = plan_stages(self, self.num_stages, reuse, placement, partition or method)
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
        for stage in placement.stages_of(self.stage_id):
            start = len(self.layer_ids)
            self.layer_ids += range(parts[stage], parts[stage + 1])
            self._ranges[stage] = (start, len(self.layer_ids))
        self._set_bounds(0, len(self.layer_ids))

    def layout(self) -> list[list[int]]:
        """The layers of each pipeline rank, in the order it holds them."""
        return [[layer for stage in self.placement.stages_of(rank)
                 for layer in range(self.parts[stage], self.parts[stage + 1])] for rank in range(self.placement.ranks)]

    def stage_of(self, layer_idx: int) -> int:
        """The stage that holds a layer."""
        assert 0 <= layer_idx < self._num_layers
        return next(stage for stage in range(self.placement.stages) if layer_idx < self.parts[stage + 1])

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that holds a layer."""
        return self.placement.rank_of(self.stage_of(layer_idx))

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
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def tie(self, spec: TiedLayerSpec, layer_id: int, module: torch.nn.Module) -> Any:
        """Register ``module`` as a further one of its key on this rank, sharing the tied weights; returns its call."""
        owner = self.tied_modules[spec.key]
        if module is not owner:
            for name in spec.tied_weight_attr:
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, self._recursive_getattr(owner, name))
            self.tied_modules[f"{spec.key}@{layer_id}"] = module
        return module if spec.forward_fn is None else partial(spec.forward_fn, module)

    @contextmanager
    def executing(self, stage: int, micro_offset: int = 0) -> Iterator[None]:
        """Expose one stage to ``forward()``, and to the recomputation of checkpointed activations in a backward.

        Args:
            stage: one of this rank's stages.
            micro_offset: how many micro-batches came before this one, which seeds the layers under ``seed_layers``.
        """
        saved = self.forward_funcs, self._local_start, self._local_stop, self.is_checkpointable_results
        seed_layers, saved_offset = self.seed_layers, self.micro_offset
        start, stop = self._ranges[stage]
        functions = self.forward_funcs[start:stop]
        if seed_layers:
            # The parent would seed by the place in the stage; the seed has to be that of an uncut rank.
            functions = [partial(self._seed_and_call, function, layer_id, micro_offset)
                         for function, layer_id in zip(functions, self.layer_ids[start:stop], strict=True)]
            self.seed_layers = False
        self.forward_funcs = functions
        self._local_start, self._local_stop = self.parts[stage], self.parts[stage + 1]
        self.is_checkpointable_results = self._checkpointable.get(stage, [])
        self.micro_offset = micro_offset
        try:
            yield
        finally:
            self.forward_funcs, self._local_start, self._local_stop, self.is_checkpointable_results = saved
            self.seed_layers, self.micro_offset = seed_layers, saved_offset

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
        (self.seed_fn or set_random_seed)(seed)
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

    def parameters_of_first_rank(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that the pipe's first rank would hold with one stage a rank."""
        layered: set[int] = set()
        first: list[torch.nn.Parameter] = []
        for layer_id, function in zip(self.layer_ids, self.forward_funcs, strict=True):
            spec = self._layer_specs[layer_id]
            is_partial = isinstance(spec, TiedLayerSpec) and isinstance(function, partial)
            layer = function.args[0] if is_partial else function
            if isinstance(layer, torch.nn.Module):
                layered.update(map(id, layer.parameters()))
                if layer_id < self.rank_parts[1]:
                    first += layer.parameters()
        if self.stage_id == 0:
            first += [parameter for parameter in self.parameters() if id(parameter) not in layered]
        return list({id(parameter): parameter for parameter in first}.values())

    def _tied_owner(self, key: str) -> int:
        """The global rank, in this pipe, of the first layer of a key: its copy is the one that counts."""
        layer_id = next(index for index, spec in enumerate(self._layer_specs)
                        if isinstance(spec, TiedLayerSpec) and spec.key == key)
        return self._grid.stage_to_global(self.stage_owner(layer_id))

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        tied_comms = super()._index_tied_modules()
        for key in tied_comms:
            for parameter in self.tied_modules[key].parameters():
                parameter.ds_pipe_replicated = self.global_rank != self._tied_owner(key)
        return tied_comms

    def _synchronize_tied_weights(self) -> None:
        for key, comm in self.tied_comms.items():
            for name in comm["weight_attr"]:
                dist.broadcast(self._recursive_getattr(comm["module"], name), src=self._tied_owner(key),
                               group=comm["group"])

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of one of this rank's layers, named by the layer's place in the model as PipelineModule does."""
        return super().ckpt_layer_path(ckpt_dir, self.layer_ids[local_layer_idx] - self._local_start)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """All files of one of this rank's layers."""
        return super().ckpt_layer_path_list(ckpt_dir, self.layer_ids[local_layer_idx] - self._local_start)
