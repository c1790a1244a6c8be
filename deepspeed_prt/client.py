"""What the user passed to ``deepspeed.initialize`` besides the model: parameters, param groups, an optimizer."""

from typing import Any

import torch
from torch import nn

from .control import Control
from .errors import PRTConfigError

ParameterKey = tuple[Any, str]
"""A parameter by where it was before migration: its module's key and its name in it."""


class ClientParameters:
    """``model_parameters`` in every form DeepSpeed takes, or the groups of an optimizer object.

    Membership in a group travels with the layer, by parameter name. Groups are the same on all ranks afterwards, so
    a rank gets the options (weight decay, learning rate) of groups that it did not have.
    """

    def __init__(self, model_parameters: Any, optimizer: Any) -> None:
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        # A generator is used up here, before the layers move.
        self.model_parameters: Any = None if model_parameters is None else list(model_parameters)
        self._groups: list[dict[str, Any]] = []
        if self.optimizer is not None:
            # DeepSpeed ignores model_parameters beside an optimizer object, and their groups may be the same dicts.
            self._groups = self.optimizer.param_groups
        elif self.model_parameters is not None:
            self._groups = self._as_groups(self.model_parameters)
        self._origin: dict[int, ParameterKey] = {}

    @staticmethod
    def _as_groups(given: list[Any]) -> list[dict[str, Any]]:
        if not given or not isinstance(given[0], dict):
            return [{"params": given}] if given else []
        for group in given:
            params = group["params"]
            group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        return given

    def check(self) -> None:
        """Refuse what cannot follow the layers.

        Raises:
            PRTConfigError: the optimizer has state, or a member is not a parameter.
        """
        if self.optimizer is not None and any(self.optimizer.state.values()):
            raise PRTConfigError(f"the {type(self.optimizer).__name__} passed to deepspeed.initialize already has "
                                 "state (some make it when they are built), which cannot follow the layers to other "
                                 "ranks; pass a callable that makes a new one, like lambda parameters: "
                                 f"{type(self.optimizer).__name__}(parameters), and load a checkpoint afterwards")
        for group in self._groups:
            for parameter in group["params"]:
                if not isinstance(parameter, torch.Tensor):
                    raise PRTConfigError(f"model_parameters holds a {type(parameter).__name__}; pass parameters, or "
                                         "dicts with a \"params\" list of them")

    def note_origin(self, parameters: list[tuple[ParameterKey, nn.Parameter]]) -> None:
        """Remember where each local parameter was; a shared one was where it comes first."""
        self._origin = {id(parameter): key for key, parameter in reversed(parameters)}

    def follow(self, module: nn.Module, parameters: list[tuple[ParameterKey, nn.Parameter]],
               control: Control) -> None:
        """Point every group at the parameters that are on this rank now."""
        came_from = {id(parameter): key for key, parameter in reversed(parameters)}
        in_order = [(came_from[id(parameter)], parameter) for parameter in module.parameters()
                    if id(parameter) in came_from]
        everyones = control.gather(self._describe())
        self._regroup(everyones, in_order)
        if self.model_parameters is not None and self.optimizer is None:
            is_plain = len(self._groups) == 1 and self._groups[0].keys() == {"params"}
            self.model_parameters = self._groups[0]["params"] if is_plain else self._groups
        if not self.model_parameters and self.optimizer is None \
                and (self.model_parameters is not None or not any(True for _ in module.parameters())):
            # torch refuses an empty list of parameters, but not a group without any.
            self.model_parameters = [{"params": []}]

    def _describe(self) -> list[tuple[dict[str, Any], list[ParameterKey]]]:
        return [(_options(group),
                 [self._origin[id(parameter)] for parameter in group["params"] if id(parameter) in self._origin])
                for group in self._groups]

    def _regroup(self, everyones: list, parameters: list) -> None:
        options: list[dict[str, Any]] = []
        place_of: dict[ParameterKey, tuple[int, int, int]] = {}
        for rank, theirs in enumerate(everyones):
            taken: set[int] = set()
            for mine, members in theirs:
                index = next((i for i, known in enumerate(options) if i not in taken and known == mine), len(options))
                if index == len(options):
                    options.append(mine)
                taken.add(index)
                # The user's order is kept, since optimizer state goes by position.
                place_of.update((key, (index, rank, position)) for position, key in enumerate(members))
        mine = dict(self._match(options))
        for index, option in enumerate(options):
            members = [parameter for key, parameter in sorted(
                ((place_of[key], parameter) for key, parameter in parameters if key in place_of),
                key=lambda item: item[0]) if key[0] == index]
            if index in mine:
                outside = [parameter for parameter in mine[index]["params"] if id(parameter) not in self._origin]
                mine[index]["params"] = outside + members
            else:
                self._groups.append({**option, "params": members})

    def _match(self, options: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        taken: set[int] = set()
        matched = []
        for group in self._groups:
            mine = _options(group)
            group.pop("param_names", None)
            index = next(i for i, known in enumerate(options) if i not in taken and known == mine)
            taken.add(index)
            matched.append((index, group))
        return matched


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says of its parameters, without naming them."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
