"""The weights of a Megatron engine under Hugging Face names: gathered over the ranks of a stage, sent from it to the
others, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from verl.engines.megatron.model import StageModel
from verl.engines.megatron.places import Place
from verl.engines.sharding import Ranks
from verl.engines.weights import EngineWeights, GatheredModule, save_folder
from verl.models.attention import use_verl_attention
from verl.models.fused_layers import fuse
from verl.models.packing import attach
from verl.models.weight_source import Adapter, NamedTensors, Names, renamed

if TYPE_CHECKING:
    from verl.engines.base import TrainEngine


class StageTensors:
    """Every weight of the model on every rank, unsharded, one at a time, in the order of the Hugging Face module."""

    def __init__(self, hf: nn.Module, model: StageModel, table: list[Place], dtype: torch.dtype) -> None:
        """`hf`: the module on the meta device; `table`: where its weights are in `model`. Collective."""
        groups = model.groups
        self._model, self._groups, self.dtype = model, groups, dtype
        self._places = {place.name: place for place in table if not place.duplicate}
        weights = hf.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self._names = {name: first.setdefault(id(weight), name) for name, weight in weights.items()}
        self.shapes = {name: tuple(weights[name].shape) for name in first.values()}
        """Of each weight, a tied one under its first name only."""
        owned: list[list[str]] = [[] for _ in range(groups.layout.pp)]
        owned[groups.stage] = list(self._places)
        if groups.pp is not None:
            dist.all_gather_object(owned, list(self._places), group=groups.pp)
        self._stage = {name: stage for stage, names in enumerate(owned) for name in names}

    @torch.no_grad()
    def each(self, ties: bool = True) -> NamedTensors:
        """`ties`: a tied weight under each of its names, else under the first. Every rank iterates to the end."""
        for name, first in self._names.items():
            if ties or name == first:
                yield name, self._tensor(first)

    def _tensor(self, name: str) -> torch.Tensor:
        groups, stage = self._groups, self._stage[name]
        if stage == groups.stage:
            tensor = self._gathered(self._places[name])
        else:
            device = next(self._model.parameters()).device
            tensor = torch.empty(self.shapes[name], dtype=self.dtype, device=device)
        if groups.pp is not None:
            dist.broadcast(tensor, groups.stage_rank(stage), group=groups.pp)
        return tensor

    def _gathered(self, place: Place) -> torch.Tensor:
        local = place.view(self._model.get_parameter(place.parameter).detach()).to(self.dtype)
        group = self._groups.ep if place.expert else self._groups.tp
        if place.split is None or group is None:
            return local
        each = -(-place.shape[place.split] // place.parts)
        missing = each - local.shape[place.split]
        if missing:  # equal parts can be gathered: the last ranks may have fewer rows of the vocabulary
            filling = [*place.sizes]
            filling[place.split] = missing
            local = torch.cat([local, local.new_zeros(filling)], dim=place.split)
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(place.parts)]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=place.split).narrow(place.split, 0, place.shape[place.split])


def prepare_for_rollout(hf: nn.Module, device: torch.device) -> None:
    """The Hugging Face module as the FSDP engine's is, for generating."""
    hf.requires_grad_(False)
    use_verl_attention(hf)
    hf.eval()
    fuse(hf, device)
    attach(hf)


class SharedModule:
    """The Hugging Face module over a stage that has all of its weights: its parameters are views of the stage's."""

    def __init__(self, hf: nn.Module, model: StageModel, table: list[Place], device: torch.device) -> None:
        self.module, self._model, self._table = hf, model, table
        prepare_for_rollout(hf, device)
        bound = {
            id(hf.get_parameter(place.name)): nn.Parameter(self._view(place), requires_grad=False)
            for place in table
        }
        for owner in hf.modules():
            for name, param in owner._parameters.items():
                if param is not None:
                    owner._parameters[name] = bound[id(param)]  # a tied one under each of its names
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(device)

    def _view(self, place: Place) -> torch.Tensor:
        return place.view(self._model.get_parameter(place.parameter).data)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with the current weights, wherever offloading has put them."""
        for place in self._table:
            self.module.get_parameter(place.name).data = self._view(place)
        yield self.module


class GatheredWeights(GatheredModule):
    """The Hugging Face module with the weights of all ranks, for generating."""

    def __init__(self, hf: nn.Module, tensors: StageTensors, device: torch.device) -> None:
        super().__init__(hf, device, "megatron")
        prepare_for_rollout(hf, device)
        self._tensors = tensors

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype:
        return self._tensors.dtype if param.is_floating_point() else param.dtype

    def _gather(self) -> None:
        for name, tensor in self._tensors.each(ties=False):
            self.module.get_parameter(name).copy_(tensor)


class MegatronWeights(EngineWeights):
    """Parts are gathered one weight at a time; `module` gathers all of them."""

    def __init__(
        self,
        engine: TrainEngine,
        hf: nn.Module,
        tensors: StageTensors,
        ranks: Ranks,
        gather: Callable[[], AbstractContextManager[nn.Module]],
        same_rows: Any,
    ) -> None:
        super().__init__(engine, hf, ranks, gather, same_rows)
        self._tensors = tensors

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        self._engine.onload(optimizer=False)
        with self._ranks.watching():
            for name, tensor in self._tensors.each():
                yield from renamed(self._model, name, tensor, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        return self.named_tensors(names)

    def adapter(self) -> Adapter | None:
        return None

    def save_hf(self, folder: Path) -> None:
        """As a Hugging Face folder. The first rank writes, and holds all weights once in host memory."""
        write = self._ranks.rank == 0
        save_folder(self._model, self.named_tensors(), folder, self.dtype, write=write)
