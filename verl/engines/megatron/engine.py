"""The Megatron training engine: one pipeline stage and one tensor-parallel part of a model on this rank.

To everything outside it speaks Hugging Face: names and shapes of weights, checkpoints and optimiser state are those of
the whole model, whatever the layout of ranks. A weight is gathered over the ranks of its stage and sent from it to the
others, one at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verl.data.proto import DataProto
from verl.engines.adamw import local
from verl.engines.base import TrainState
from verl.engines.megatron.groups import ParallelGroups
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.optimizer import StageAdamW
from verl.engines.megatron.places import Place
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.offload import ModelMemory
from verl.engines.runner_engine import RunnerEngine
from verl.engines.settings import EngineSettings
from verl.engines.sharding import EngineRanks
from verl.engines.weights import EngineWeights, GatheredModule, bind
from verl.models.attention import use_verl_attention
from verl.models.fused_layers import fuse
from verl.models.packing import attach
from verl.models.weight_source import Adapter, NamedTensors, Names, renamed


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
            if not ties and name != first:
                continue
            groups, stage = self._groups, self._stage[first]
            if stage == groups.stage:
                tensor = self._gathered(self._places[first])
            else:
                device = next(self._model.parameters()).device
                tensor = torch.empty(self.shapes[first], dtype=self.dtype, device=device)
            if groups.pp is not None:
                dist.broadcast(tensor, groups.stage_rank(stage), group=groups.pp)
            yield name, tensor

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
        bind(hf, [(hf.get_parameter(place.name), self._view(place)) for place in table], device)

    def _view(self, place: Place) -> torch.Tensor:
        return place.view(self._model.get_parameter(place.parameter).data)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with the current weights, wherever offloading has put them."""
        for place in self._table:
            self.module.get_parameter(place.name).data = self._view(place)
        yield self.module


class GatheredStages(GatheredModule):
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

    def __init__(self, engine: MegatronEngine) -> None:
        super().__init__(engine)
        self._tensors = engine.tensors

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        self._engine.onload(optimizer=False)
        with self._engine.watching():
            for name, tensor in self._tensors.each():
                yield from renamed(self._engine.hf, name, tensor, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        return self.named_tensors(names)

    def adapter(self) -> Adapter | None:
        return None


@lru_cache(maxsize=32)
def _mesh(groups: ParallelGroups, expert: bool, device_type: str) -> DeviceMesh:
    """The ranks of this stage that split a weight, times those that hold the same part of it; without a dimension of
    one rank, for which there is no process group."""
    layout = groups.layout
    replicas, tp = layout.dp * layout.cp, layout.tp
    stage = torch.arange(replicas * tp).view(replicas, tp) + groups.stage * replicas * tp
    ranks = stage.view(-1, layout.ep) if expert else stage
    pair = (groups.ep, groups.expert_data) if expert else (groups.tp, groups.data)
    found = [group for group in pair if group is not None]
    if not found:
        return DeviceMesh(device_type, [groups.rank], _init_backend=False)
    names = ("split", "replicas")
    dims = tuple(name for name, group in zip(names, pair, strict=True) if group is not None)
    return DeviceMesh.from_group(found, device_type, ranks.t().squeeze().contiguous(), mesh_dim_names=dims)


def as_dtensor(
    place: Place | None, tensor: torch.Tensor, groups: ParallelGroups, rows_sharded: bool = False
) -> DTensor:
    """This rank's part of a weight or moment, without a copy. `rows_sharded`: the ranks that hold the same part of the
    weight have a chunk of its rows each, and `tensor` is this rank's. Without a place every rank of this stage has the
    same, such as the count of steps of a weight."""
    mesh = _mesh(groups, place is not None and place.expert, tensor.device.type)
    kinds: dict[str, Placement] = {
        "split": Replicate(),
        "replicas": Shard(0) if rows_sharded else Replicate(),
    }
    if place is not None and place.split is not None:
        kinds["split"] = Shard(place.split)
    shape = torch.Size(tensor.shape if place is None else place.shape)
    stride = torch.empty(shape, device="meta").stride()
    kept = [kinds[name] for name in mesh.mesh_dim_names or ()] or [Replicate()]
    return DTensor.from_local(tensor, mesh, kept, run_check=False, shape=shape, stride=stride)


def elsewhere(shapes: Mapping[str, tuple[int, ...]], own: Container[str]) -> dict[str, torch.Tensor]:
    """On the meta device, placeholders of the tensors that other stages hold: all of `shapes` without `own`."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name not in own}


class MegatronEngine(RunnerEngine):
    """Built by `verl.engines.megatron.build`."""

    def __init__(
        self,
        model: StageModel,
        hf: nn.Module,
        table: list[Place],
        settings: EngineSettings,
        ranks: EngineRanks,
        runner: MicroBatchRunner,
    ) -> None:
        """`hf`: the Hugging Face model on the meta device; `table`: where its weights are in `model`."""
        memory = ModelMemory(model, ranks.device, sharded=False)
        super().__init__(hf, settings, ranks, runner, memory)
        self._model, self._table, self._groups = model, table, model.groups
        self.same_rows = self._groups.model
        self.tensors = StageTensors(hf, model, table, settings.dtype)
        layout = self._groups.layout
        self._rollout_module: SharedModule | GatheredStages
        if layout.tp == layout.pp == layout.ep == 1:
            self._rollout_module = SharedModule(hf, model, table, ranks.device)
        else:
            self._rollout_module = GatheredStages(hf, self.tensors, ranks.device)

    def float32_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor | None:
        if self._settings.dtype != torch.float32:
            return None  # the weights of a layer are in Megatron's own products, which keep their precision
        return super().float32_log_probs(batch, temperature=temperature)

    # -- weights ------------------------------------------------------------------------------------------------

    def weights(self) -> MegatronWeights:
        return MegatronWeights(self)

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        self._onload("model")
        with self.watching(), self._rollout_module.gathered() as module:
            yield module

    # -- state --------------------------------------------------------------------------------------------------

    def saved_weights(self) -> dict[str, torch.Tensor]:
        stage = dict(self._model.named_parameters())
        masters = self._optimizer.masters if self._optimizer else {}
        own: dict[str, torch.Tensor] = {}
        for place in self._table:
            if place.duplicate:
                continue
            trained = place.name in masters
            tensor = masters[place.name] if trained else place.view(stage[place.parameter])
            own[place.name] = as_dtensor(place, tensor.detach(), self._groups, rows_sharded=trained)
        return own | elsewhere(self.tensors.shapes, own)

    def state(self) -> TrainState:
        state = super().state()
        if isinstance(self._optimizer, StageAdamW):
            table = {place.name: place for place in self._optimizer.table}
            for key, values in state["optimizer"].items():
                counts = key == "step"
                own = {
                    name: as_dtensor(None if counts else table[name], value, self._groups, not counts)
                    for name, value in values.items()
                }
                shapes = {n: () if counts else shape for n, shape in self.tensors.shapes.items()}
                if self._settings.model.freeze_embeddings:
                    shapes.pop("model.embed_tokens.weight", None)
                state["optimizer"][key] = own | elsewhere(shapes, own)
        return state

    def load_state(self, state: TrainState) -> None:
        optimizer = {
            key: {name: local(value) for name, value in values.items() if not value.is_meta}
            for key, values in state["optimizer"].items()
        }
        super().load_state({**state, "optimizer": optimizer})  # type: ignore[typeddict-item]

    # -- memory -------------------------------------------------------------------------------------------------

    def _move_model(self, to_host: bool) -> None:
        super()._move_model(to_host)
        if isinstance(self._optimizer, StageAdamW):
            self._optimizer.rebind()
