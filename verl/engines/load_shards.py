"""Fill a sharded model, whose parameters are on the meta device, from files: each rank reads its own rows.

What always holds: a rank never holds more than its shards and the rows it is reading; parameters that were real
before (adapters, a critic's head) and buffers keep their values; parameters stay the same objects.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from verl.models.lora import plain_name
from verl.models.meta_init import WeightSource


def own_rows(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Which of `rows` rows are this rank's: equal chunks, rounded up, so that the last ranks may have fewer."""
    shards, at = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    each = -(-rows // shards)
    return min(at * each, rows), min((at + 1) * each, rows)


@torch.no_grad()
def fill(model: nn.Module, mesh: DeviceMesh, source: WeightSource, device: torch.device) -> None:
    """`device` is where the shards live: the ranks' device, or the host when shards stay there."""
    waiting = {name for name, param in model.named_parameters() if param.is_meta}
    real = {name: _local(param).clone() for name, param in model.named_parameters() if name not in waiting}
    buffers = [(owner, name, held) for owner in model.modules() for name, held in _own_buffers(owner)]
    model.to_empty(device=device)
    for owner, name, held in buffers:
        setattr(owner, name, held)
    for name, param in model.named_parameters():
        if name in real:
            _local(param).copy_(real[name])
            continue
        start, stop = own_rows(param.shape[0], mesh)
        if stop > start:
            source.read_rows(plain_name(name) or name, start, stop, _local(param))


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local()  # type: ignore[attr-defined, no-any-return]


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(recurse=False))
