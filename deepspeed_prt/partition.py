"""Where the model is cut: stage boundaries, and how many stages a rank gets."""

import contextlib
import io
import itertools
import re
from collections.abc import Sequence

from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import logger

from .errors import PRTConfigError
from .program.placement import Placement

IMBALANCE = 1.1
"""``reuse: "auto"`` accepts a heaviest rank that is this much heavier than with the best reuse."""


def plan_stages(module: PipelineModule, ranks: int, reuse: int | str, placement: str, direction: str,
                partition: str | list[int]) -> tuple[Placement, list[int]]:
    """Choose reuse and boundaries.

    Args:
        module: gives the layers, and the method that cuts them.
        ranks: p.
        reuse: v, or ``"auto"``: the largest v whose p*v stages all have layers and whose heaviest rank, in layers (or
            trainable parameters, where the method counts those), is within ``IMBALANCE`` of the best.
        placement: ``"loop"`` or ``"wave"``.
        direction: ``"unidirectional"`` or ``"bidirectional"``.
        partition: a method of PipelineModule, or the p*v + 1 boundaries.

    Returns:
        The placement and its p*v + 1 boundaries, from 0 to the number of layers.

    Raises:
        PRTConfigError: too few layers, or boundaries that do not fit.
    """
    layers = len(module._layer_specs)
    if not isinstance(partition, str):
        return _given(partition, layers, ranks, reuse, placement, direction)
    if reuse == "auto":
        plans = []
        for candidate in range(1, max(layers // ranks, 1) + 1):
            route = Placement(placement, ranks, candidate, direction)
            boundaries = cut(module, partition, route.stages)
            if candidate == 1 or all(a < b for a, b in itertools.pairwise(boundaries)):
                plans.append((_heaviest_rank(module, partition, route, boundaries), route, boundaries))
        best = min(weight for weight, _, _ in plans)
        _, route, boundaries = [plan for plan in plans if plan[0] <= IMBALANCE * best][-1]
        return route, boundaries
    assert isinstance(reuse, int)
    route = Placement(placement, ranks, reuse, direction)
    if reuse > 1 and route.stages > layers:
        raise PRTConfigError(f"{layers} layers cannot fill {ranks} ranks x {reuse} stages = {route.stages} stages; "
                             f"use reuse <= {max(layers // ranks, 1)}")
    return route, cut(module, partition, route.stages)


def _given(boundaries: list[int], layers: int, ranks: int, reuse: int | str, placement: str,
           direction: str) -> tuple[Placement, list[int]]:
    stages = len(boundaries) - 1
    if reuse == "auto":
        reuse = max(stages // ranks, 1)
    assert isinstance(reuse, int)
    if stages != ranks * reuse:
        raise PRTConfigError(f'"partition" has {len(boundaries)} boundaries, which make {stages} stages, but {ranks} '
                             f"ranks x {reuse} stages = {ranks * reuse} stages need {ranks * reuse + 1} boundaries")
    if boundaries[0] != 0 or boundaries[-1] != layers or list(boundaries) != sorted(boundaries):
        raise PRTConfigError(f'"partition" boundaries {boundaries} must rise from 0 to {layers}, the number of layers')
    return Placement(placement, ranks, reuse, direction), list(boundaries)


def cut(module: PipelineModule, method: str, stages: int) -> list[int]:
    """Ask the module's own ``_partition_layers`` for ``stages`` parts.

    Raises:
        PRTConfigError: the method does not give as many parts.
    """
    before = module.num_stages, getattr(module, "parts", None), module._local_start, module._local_stop
    module.num_stages = stages
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # The module's stage_id is its rank, which a cut into more parts contains as well.
            type(module)._partition_layers(module, method=method)
        parts = [int(boundary) for boundary in module.parts]
    except (re.error, RuntimeError) as error:  # of a pattern of layer types
        raise PRTConfigError(f'"partition": {method!r} cannot cut {len(module._layer_specs)} layers into {stages} '
                             f"stages: {error}") from error
    finally:
        logger.disabled = was_disabled
        module.num_stages, module.parts, module._local_start, module._local_stop = before
    if len(parts) != stages + 1 or parts[0] != 0 or parts[-1] != len(module._layer_specs) or parts != sorted(parts):
        raise PRTConfigError(f"{type(module).__name__}._partition_layers gave boundaries {parts} where {stages} stages "
                             f'were asked for (num_stages); make it use num_stages, or set "partition" in the "prt" '
                             f"section to a list of {stages + 1} boundaries")
    return parts


def _heaviest_rank(module: PipelineModule, method: str, route: Placement, boundaries: Sequence[int]) -> float:
    weights = module._count_layer_params() if method.lower() == "parameters" else [1] * len(module._layer_specs)
    of_stage = [sum(weights[start:stop]) for start, stop in itertools.pairwise(boundaries)]
    # Each pipe takes an equal share of the micro-batches.
    return max(
        sum(of_stage[stage] for pipe in range(route.pipes) for stage in route.stages_of(rank, pipe)) / route.pipes
        for rank in range(route.ranks))
