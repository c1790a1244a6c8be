"""What cannot work together, and what to change."""

import os
from collections.abc import Sequence
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from torch import nn

from .config import PRTConfig
from .errors import PRTConfigError
from .module import PRTPipelineModule


def refuse_unsupported(section: PRTConfig, config_class: Any, model: Any) -> None:
    """Refuse what cannot work, on every rank alike and before any communication.

    Raises:
        PRTConfigError: with what to change.
    """
    zero_stage = config_class.zero_optimization_stage
    if zero_stage > 1:
        raise PRTConfigError(f"ZeRO-{zero_stage} is incompatible with pipeline parallelism, whose gradients are needed "
                             'whole until the end of the batch; use "zero_optimization": {"stage": 1} or 0')
    slices = model.mpu().get_slice_parallel_world_size()
    if slices > 1 and (config_class.pipeline["pipe_partitioned"] or config_class.pipeline["grad_partitioned"]):
        raise PRTConfigError(f"activations cannot be partitioned over {slices} tensor-parallel ranks between reused "
                             'stages yet; set "pipeline": {"pipe_partitioned": false, "grad_partitioned": false}')
    if get_accelerator().device_name() == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise PRTConfigError("with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a GPU share one queue, in which "
                             "compute would wait behind messages that wait for compute, possibly for ever; unset it, "
                             "or use 8 or more")
    if isinstance(model, PRTPipelineModule):
        if section.partition not in (None, model.__dict__.get("_prt_partition")):
            raise PRTConfigError('"partition" comes too late for a PRTPipelineModule, which is cut already (by an '
                                 "earlier deepspeed.initialize, or by its constructor, which takes partition= too); "
                                 "leave the key out")
        have = model.placement
        built = {"reuse": have.reuse, "placement": have.name, "direction": have.direction}
        for key, value in built.items():
            asked = getattr(section, key)
            if key in section.model_fields_set and asked not in ("auto", value):
                raise PRTConfigError(f'the "prt" section asks for "{key}": {asked!r}, but the PRTPipelineModule was '
                                     f"built with {value!r}; make them agree, or leave the key out")


def refuse_in_both_directions(section: PRTConfig, module: Any) -> PRTConfigError | None:
    """What this rank has that does not stay equal, or cannot be kept equal, in two copies, if it has any."""
    is_bidirectional = section.direction == "bidirectional" or (
        isinstance(module, PRTPipelineModule) and module.placement.pipes == 2)
    if not is_bidirectional:
        return None
    instead = 'use "direction": "unidirectional"'
    if any(is_moe_param(parameter) for parameter in module.parameters()):
        return PRTConfigError("expert parallelism is not supported in a bidirectional pipeline, whose two copies of an "
                              f"expert would belong to different expert groups; {instead}")
    embeddings = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    if any(layer.sparse for layer in embeddings):
        return PRTConfigError("the sparse gradients of an embedding cannot be summed over the two copies in a "
                              f"bidirectional pipeline; leave sparse out, or {instead}")
    if any(layer.max_norm is not None for layer in embeddings):
        return PRTConfigError("an embedding with max_norm changes its rows as it is used, and the two copies in a "
                              f"bidirectional pipeline see different ones; leave max_norm out, or {instead}")
    outside = [name for name, parameter in module.named_parameters()
               if parameter.requires_grad and not name.split(".")[0].isdigit() and not name.startswith("tied_modules.")]
    if outside:
        return PRTConfigError(f"{outside[0]} belongs to no layer, and in a bidirectional pipeline two ranks would "
                              f"train copies of it apart; make it part of the last layer, or {instead}")
    return None


def refuse_uneven_groups(engine: Any, groups: Sequence[int]) -> PRTConfigError | None:
    """DeepSpeed's optimizers for ZeRO-1 and fp16 sum the norm over all ranks once for each group; the rest would wait.

    Args:
        engine: with its optimizer.
        groups: how many parameter groups each rank of the pipe has.
    """
    if engine.using_bf16_optimizer or not (engine.zero_optimization() or engine.fp16_enabled()) \
            or len(set(groups)) == 1:
        return None
    fewest, most = groups.index(min(groups)), groups.index(max(groups))
    return PRTConfigError(f"the weights that rank {fewest} holds are in {min(groups)} of the parameter groups, those "
                          f"of rank {most} in {max(groups)}, but ZeRO-1 and fp16 take the gradient norm group by "
                          'group, each time on all ranks; use another "placement", "reuse" or "partition", so that '
                          "each rank has layers of every group, or fewer groups, or bf16 or fp32 without ZeRO")


def refuse_empty_norm(engine: Any) -> PRTConfigError | None:
    """DeepSpeed's BF16_Optimizer cannot take the norm of no gradients, as it would on a rank of copies only."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if not engine.using_bf16_optimizer or any(not getattr(parameter, "ds_pipe_replicated", False)
                                            for parameter in trained):
        return None
    return PRTConfigError(f"all weights that rank {engine.stage_id} trains are copies of those of other ranks (of tied "
                          "layers, or of the other direction), which a gradient norm leaves out, and DeepSpeed's bf16 "
                          'optimizer needs one that counts on every rank; use another "placement", "reuse" or '
                          '"partition"')
