"""Migration: turns a built PipelineModule into a PRTPipelineModule by moving its layers to their new ranks.

The object on a layer's first owner is the truth: weights, buffers, requires_grad flags, whatever was injected after
construction. It travels as it is. No random number is drawn, and what stays local stays the same object.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from .client import ClientParameters, ParameterKey
from .config import PRTConfig
from .control import Control
from .errors import PRTConfigError, PRTError, as_config_errors
from .module import PRTPipelineModule
from .packing import ModuleKey, check_movable, pack, reached_parameters, unpack
from .partition import plan_stages
from .program.placement import Placement


def migrate(module: PipelineModule, section: PRTConfig, client: ClientParameters, control: Control,
            check: Callable[[Placement], object], every_rank_trains: bool) -> None:
    """Cut ``module`` anew and move every layer to the rank that now owns it; a collective over the world.

    ``module`` stays the same object, of the same class name, now also a PRTPipelineModule. ``client`` (the optimizer
    and parameter groups passed to ``deepspeed.initialize``) follows the layers. ``check`` raises if nothing can be run
    on a placement. ``every_rank_trains`` refuses a placement that leaves a rank without trainable parameters, which
    DeepSpeed's optimizers for ZeRO-1, bf16 and fp16 cannot do with.

    Raises:
        PRTError: the model cannot be cut or moved as asked; on every rank, before anything has changed.
    """
    move = _Move(module, control)
    error: Exception | None = None
    route, parts = None, None
    try:
        move.find_local()
        client.check()
    except PRTError as caught:
        error = caught
    control.agree(error, "looking at the layers")
    move.hear()
    try:
        # Real parameter counts, gathered, instead of building every layer once more.
        module._count_layer_params = lambda: move.parameter_counts  # type: ignore[method-assign]
        method = section.partition
        if method is None:
            if not hasattr(module, "_prt_partition_method"):
                raise PRTConfigError("the PipelineModule was built before deepspeed_prt was imported, so its partition "
                                     'method is unknown; import deepspeed_prt first, or set "partition"')
            method = module._prt_partition_method
        with as_config_errors():
            route, parts = plan_stages(module, module._topo.get_dim("pipe"), section.reuse, section.placement,
                                       section.direction, method)
        check(route)
        move.plan(route, parts)
        if every_rank_trains:
            move.check_every_rank_trains()
    except PRTError as caught:
        error = caught
    finally:
        module.__dict__.pop("_count_layer_params", None)
    control.agree(error, "planning the migration")
    assert route is not None and parts is not None

    client.note_origin(list(move.local_parameters()))
    try:
        move.exchange()
    except Exception as caught:
        error = caught
    control.agree(error, "moving layers")
    move.install(route, parts)
    module.__dict__["_prt_partition"] = section.partition
    client.follow(module, move.new_parameters(), control)


@dataclass
class _Component:
    """Modules of one rank that share parameters, and so travel together, and where they go."""

    keys: list[ModuleKey]
    targets: set[int] = field(default_factory=set)


class _Move:
    """One migration of one module."""

    def __init__(self, module: PipelineModule, control: Control) -> None:
        self.module = module
        self.control = control
        self.rank = module.stage_id
        self.specs = module._layer_specs
        self.old_owner = [module.stage_owner(index) for index in range(len(self.specs))]
        self.functions = {
            index: function
            for index, function in zip(range(module._local_start, module._local_stop), module.forward_funcs,
                                       strict=True)
        }
        self.local: dict[ModuleKey, nn.Module] = {}

    def find_local(self) -> None:
        """Find the modules of this rank.

        Raises:
            PRTConfigError: a layer is no module any more.
        """
        for index, function in self.functions.items():
            key = self._key(index)
            if key is not None:
                self.local[key] = self._module_of(index, function)

    def hear(self) -> None:
        """Learn from all ranks which modules travel together, and how many trainable parameters each layer has."""
        heard = self.control.gather((self._counts(), self._components()))
        counts: dict[int, int] = {}
        for theirs, _ in heard:
            counts.update(theirs)
        self.parameter_counts = [counts.get(index, 0) for index in range(len(self.specs))]
        self.components = [[_Component(keys) for keys in components] for _, components in heard]

    def _key(self, index: int) -> ModuleKey | None:
        """The module behind a layer; None for a plain function."""
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec):
            return self.old_owner[index], spec.key
        if isinstance(spec, (LayerSpec, nn.Module)):
            return self.old_owner[index], index
        return None

    def _module_of(self, index: int, function: Any) -> nn.Module:
        """The module that a rank runs for a layer: what stands in ``forward_funcs``, which users may have replaced."""
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
            return self.module.tied_modules[spec.key]
        if not isinstance(function, nn.Module):
            raise PRTConfigError(f"layer {index} was built as a module but is now a {type(function).__name__}; "
                                 "replace it by a torch.nn.Module, which can move to another rank")
        return function

    def _counts(self) -> dict[int, int]:
        counts = {}
        for index in self.functions:
            key = self._key(index)
            if key is not None:
                counts[index] = sum(parameter.numel() for parameter in self.local[key].parameters()
                                    if parameter.requires_grad)
        return counts

    def _components(self) -> list[list[ModuleKey]]:
        """This rank's modules, those that reach a common parameter together, by first layer."""
        components: list[tuple[set[int], list[ModuleKey]]] = []
        for key, module in self.local.items():
            ids = reached_parameters(module)
            touching = [component for component in components if component[0] & ids]
            merged = (ids.union(*(c[0] for c in touching)), [k for c in touching for k in c[1]] + [key])
            components = [c for c in components if c not in touching] + [merged]
        return [keys for _, keys in components]

    def plan(self, route: Placement, parts: list[int]) -> None:
        """Find where every module goes.

        Raises:
            PRTConfigError: layers that share parameters without being tied would be parted, or one that moves has hooks
                or methods that cannot.
        """
        stage_at = [next(stage for stage in range(route.stages) if index < parts[stage + 1])
                    for index in range(len(self.specs))]
        self.new_owners = [{owners[stage] for owners in route.routes} for stage in stage_at]
        layers: dict[ModuleKey, list[int]] = {}
        for index in range(len(self.specs)):
            key = self._key(index)
            if key is not None:
                layers.setdefault(key, []).append(index)
        for component in (component for components in self.components for component in components):
            owners = [self.new_owners[index] for key in component.keys for index in layers[key]]
            component.targets = set().union(*owners)
            if len(component.keys) > 1 and any(theirs != owners[0] for theirs in owners):
                members = sorted(index for key in component.keys for index in layers[key])
                raise PRTConfigError(f"layers {', '.join(map(str, members))} share parameters and would come to "
                                     f"different ranks; tie them with TiedLayerSpec, or keep them together with a list "
                                     'of boundaries in "partition"')
        for component in self.components[self.rank]:
            if component.targets != {self.rank}:
                for key in component.keys:
                    check_movable(self.local[key], key[1])

    def check_every_rank_trains(self) -> None:
        """Refuse a placement that leaves a rank nothing to train.

        Raises:
            PRTConfigError: there is such a rank.
        """
        for rank in range(self.module._topo.get_dim("pipe")):
            layers = [index for index, owners in enumerate(self.new_owners) if rank in owners]
            if not any(self.parameter_counts[index] for index in layers):
                raise PRTConfigError(f"rank {rank} would hold layers {layers}, none of which has a trainable "
                                     'parameter, and ZeRO-1, bf16 and fp16 need one on every rank; use another '
                                     '"placement", "reuse" or "partition"')

    def local_parameters(self) -> Iterator[tuple[ParameterKey, nn.Parameter]]:
        """This rank's parameters before the move."""
        for key, module in self.local.items():
            for name, parameter in module.named_parameters():
                yield (key, name), parameter

    def exchange(self) -> None:
        """Send modules away and take others in, in one order for all ranks."""
        self.arrived: dict[ModuleKey, nn.Module] = {}
        error: Exception | None = None
        for source, components in enumerate(self.components):
            for component in components:
                for target in sorted(component.targets):
                    if self.rank == source == target:
                        self.arrived.update((key, self.local[key]) for key in component.keys)
                    elif self.rank == source:
                        self.control.send(pack({key: self.local[key] for key in component.keys}), target)
                    elif self.rank == target:
                        payload = self.control.recv(source)
                        try:
                            self.arrived.update(self._unpack(payload))
                        except Exception as caught:  # others still wait for their turn
                            error = error or caught
        if error is not None:
            raise error

    def _unpack(self, payload: bytes) -> dict[ModuleKey, nn.Module]:
        device = get_accelerator().device_name(self.module.local_rank)
        modules = unpack(payload, device, self._build)
        compiled = getattr(self.module, "_prt_compile_arguments", None)
        if compiled is not None:
            for module in modules.values():
                module.compile(*compiled[0], **compiled[1])
        return modules

    def _build(self, key: ModuleKey) -> nn.Module:
        spec = self.specs[next(index for index in range(len(self.specs)) if self._key(index) == key)]
        module: nn.Module = spec if isinstance(spec, nn.Module) else spec.build()
        return module

    def install(self, route: Placement, parts: list[int]) -> None:
        """Make the module a PRTPipelineModule that holds what has arrived."""
        module = self.module
        for key in self.local:
            if not isinstance(key[1], str):
                module._modules.pop(str(key[1]), None)
        cls = type(module)
        bases = (PRTPipelineModule, ) if cls is PipelineModule else (PRTPipelineModule, cls)
        # A class swap, not a new object, as FSDP2's fully_shard does it: every reference the user holds stays good.
        module.__class__ = type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})
        module.set_stages(route, parts, [int(boundary) for boundary in module.parts])
        module.forward_funcs = []
        module.fwd_map = {}
        module.tied_modules = nn.ModuleDict()
        module.tied_weight_attrs = {}
        for layer_id in module.layer_ids:
            self._install_layer(layer_id)
        module.tied_comms = module._index_tied_modules()
        module._precompute_checkpointable_values()

    def _install_layer(self, layer_id: int) -> None:
        module, spec, key = self.module, self.specs[layer_id], self._key(layer_id)
        if key is None:
            module.forward_funcs.append(self.functions.get(layer_id, spec))
        elif isinstance(spec, TiedLayerSpec):
            if spec.key not in module.tied_modules:
                module.tied_modules[spec.key] = self.arrived[key]
                module.tied_weight_attrs[spec.key] = spec.tied_weight_attr
            module.forward_funcs.append(module.tie(spec, layer_id, self.arrived[key]))
        else:
            module.forward_funcs.append(self.arrived[key])
            module.fwd_map[str(layer_id)] = len(module.forward_funcs) - 1
            module.add_module(str(layer_id), self.arrived[key])

    def new_parameters(self) -> list[tuple[ParameterKey, nn.Parameter]]:
        """This rank's parameters after the move, by where they came from."""
        return [((key, name), parameter) for key, module in self.arrived.items()
                for name, parameter in module.named_parameters()]
