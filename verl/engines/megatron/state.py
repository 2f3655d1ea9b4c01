"""Weights and moments of a stage as checkpoints take them: under Hugging Face names, with their global shapes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verl.engines.megatron.groups import ParallelGroups
from verl.engines.megatron.places import Place


@lru_cache(maxsize=32)
def _mesh(groups: ParallelGroups, expert: bool, device_type: str) -> DeviceMesh:
    """The ranks of this stage that split a weight, times those that hold the same part of it; without a dimension of
    one rank, for which there is no process group."""
    layout = groups.layout
    replicas, tp = layout.dp * layout.cp, layout.tp
    stage = torch.arange(replicas * tp).view(replicas, tp) + groups.stage * replicas * tp
    ranks = stage[:, groups.tp_rank].view(-1, layout.ep) if expert else stage
    pair = (groups.ep, groups.expert_data) if expert else (groups.tp, groups.data)
    found = [group for group in pair if group is not None]
    if not found:
        return DeviceMesh(device_type, [groups.rank], _init_backend=False)
    names = ("split", "replicas")
    dims = tuple(name for name, group in zip(names, pair, strict=True) if group is not None)
    return DeviceMesh.from_group(found, device_type, ranks.t().squeeze().contiguous(), mesh_dim_names=dims)


def _dtensor(
    tensor: torch.Tensor,
    groups: ParallelGroups,
    placements: tuple[Placement, Placement],
    shape: tuple[int, ...],
    expert: bool = False,
) -> DTensor:
    mesh = _mesh(groups, expert, tensor.device.type)
    dims = mesh.mesh_dim_names or ()
    kept = [kind for name, kind in zip(("split", "replicas"), placements, strict=True) if name in dims]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        tensor, mesh, kept or [Replicate()], run_check=False, shape=torch.Size(shape), stride=stride
    )


def as_dtensor(place: Place, tensor: torch.Tensor, groups: ParallelGroups, rows_sharded: bool) -> DTensor:
    """This rank's part of a weight or moment, without a copy. `rows_sharded`: the ranks that hold the same part of the
    weight have a chunk of its rows each, and `tensor` is this rank's."""
    split = Replicate() if place.split is None else Shard(place.split)
    rows = Shard(0) if rows_sharded else Replicate()
    return _dtensor(tensor, groups, (split, rows), place.shape, place.expert)


def replicated(tensor: torch.Tensor, groups: ParallelGroups) -> DTensor:
    """What every rank of this stage has the same of, such as the count of steps of a weight."""
    return _dtensor(tensor, groups, (Replicate(), Replicate()), tuple(tensor.shape))


def elsewhere(shapes: Mapping[str, tuple[int, ...]], own: Container[str]) -> dict[str, torch.Tensor]:
    """On the meta device, placeholders of the tensors that other stages hold: all of `shapes` without `own`."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name not in own}
