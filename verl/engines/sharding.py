"""FSDP2 (`fully_shard`) around a Hugging Face model: one group per decoder layer, the rest in the root.

What always holds: trained parameters are sharded in float32, so each rank's shard is its part of the master
weights; the gathered copies the model computes with have the parameters' configured precision; gradients are
reduced and accumulated in float32. Names stay those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from verl.engines.settings import Sharding
from verl.models.classes import class_of
from verl.models.forward import FORWARD_METHOD
from verl.models.value_model import ValueModel


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks: the classes the model declares unsplittable, else the longest list of modules."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    names = set(getattr(backbone, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if class_of(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    options: Sharding,
    compute_dtype: torch.dtype,
    float32_masters: bool = True,
) -> None:
    """Shard in place over the mesh (one dimension: all ranks; two: replicate, shard)."""
    policy = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if options.offload_policy else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        if float32_masters:
            _trained_to_float32(layer)
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **common)
    if float32_masters:
        _trained_to_float32(model)
    fully_shard(model, **common)
    register_fsdp_forward_method(model, FORWARD_METHOD)


def _trained_to_float32(module: nn.Module) -> None:
    """Layer by layer, so that a rank never holds the whole model in float32."""
    for param in module.parameters():
        if param.requires_grad and not hasattr(param, "to_local"):
            param.data = param.data.float()


def sharded_parts(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 gathers together, in the same order on every rank."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def own_modules(part: nn.Module) -> Iterator[nn.Module]:
    """The modules of one part, without those of a part inside it."""
    yield part
    for child in part.children():
        if not isinstance(child, FSDPModule):
            yield from own_modules(child)


def release(model: nn.Module) -> None:
    """After passes without a backward: parameters back to shards (the root's stay gathered), and no record of them.

    FSDP2 records every forward and clears the record in a backward only, which takes the last recorded forward for
    the one to prefetch. Ranks whose records differ would then gather different parameters and wait for ever."""
    for part in sharded_parts(model):
        part.reshard()
        group = part._get_fsdp_state()._fsdp_param_group
        if group is not None and group._post_forward_indices:  # without a forward there is no record yet
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()


@contextmanager
def gathered(model: nn.Module, options: Sharding) -> Iterator[nn.Module]:
    """Every parameter whole on every rank, and staying so through forward passes, until the context ends."""
    parts = sharded_parts(model)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield model
    finally:
        for part in parts:
            part.set_reshard_after_forward(
                options.reshard_after_forward if part is not model else False, recurse=False
            )
        release(model)
