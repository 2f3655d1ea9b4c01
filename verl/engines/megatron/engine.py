"""The Megatron training engine: one pipeline stage and one tensor-parallel part of a model on this rank.

To everything outside it speaks Hugging Face: names and shapes of weights, checkpoints and optimiser state are those of
the whole model, whatever the layout of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from verl.data.proto import DataProto
from verl.engines.adamw import local
from verl.engines.base import TrainState
from verl.engines.megatron.model import StageModel
from verl.engines.megatron.optimizer import StageAdamW
from verl.engines.megatron.places import Place
from verl.engines.megatron.state import as_dtensor, elsewhere, replicated
from verl.engines.megatron.weights import GatheredWeights, MegatronWeights, SharedModule, StageTensors
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.offload import ModelMemory
from verl.engines.runner_engine import RunnerEngine, engine_info
from verl.engines.settings import EngineSettings
from verl.engines.sharding import Ranks
from verl.engines.weights import save_config
from verl.errors import ConfigError

NO_LORA = "strategy=megatron has no LoRA adapters; set strategy=fsdp for this role, or model.lora_rank=0"


class MegatronEngine(RunnerEngine):
    """Built by `verl.engines.megatron.build`."""

    def __init__(
        self,
        model: StageModel,
        hf: nn.Module,
        table: list[Place],
        settings: EngineSettings,
        ranks: Ranks,
        runner: MicroBatchRunner,
    ) -> None:
        """`hf`: the Hugging Face model on the meta device; `table`: where its weights are in `model`."""
        super().__init__(engine_info(hf, settings, ranks, packed=True), settings, ranks, runner)
        self._model, self._hf, self._table = model, hf, table
        self._groups = model.groups
        self._memory = ModelMemory(model, ranks.device, sharded=False)
        self._tensors = StageTensors(hf, model, table, settings.dtype)
        layout = self._groups.layout
        whole = layout.tp == layout.pp == layout.ep == 1
        self._gathered = (
            SharedModule(hf, model, table, ranks.device)
            if whole
            else GatheredWeights(hf, self._tensors, ranks.device)
        )

    def float32_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor | None:
        if self._settings.dtype != torch.float32:
            return None  # the weights of a layer are in Megatron's own products, which keep their precision
        return super().float32_log_probs(batch, temperature=temperature)

    def reference_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor:
        raise ConfigError(NO_LORA)

    def refresh_reference(self) -> None:
        raise ConfigError(NO_LORA)

    # -- weights ------------------------------------------------------------------------------------------------

    def weights(self) -> MegatronWeights:
        return MegatronWeights(self, self._hf, self._tensors, self._ranks, self._module, self._groups.model)

    @contextmanager
    def _module(self) -> Iterator[nn.Module]:
        self._onload("model")
        with self._ranks.watching(), self._gathered.gathered() as module:
            yield module

    def save_hf(self, folder: Path) -> None:
        with self._all_ranks_saved():
            self.weights().save_hf(Path(folder))

    def save_hf_config(self, folder: Path) -> None:
        save_config(self._hf, Path(folder), self._settings.dtype)

    def save_adapter(self, folder: Path) -> None:
        raise ConfigError(NO_LORA)

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
        return own | elsewhere(self._tensors.shapes, own)

    def state(self) -> TrainState:
        state = super().state()
        if isinstance(self._optimizer, StageAdamW):
            table = {place.name: place for place in self._optimizer.table}
            for key, values in state["optimizer"].items():
                counts = key == "step"
                own = {
                    name: replicated(value, self._groups)
                    if counts
                    else as_dtensor(table[name], value, self._groups, rows_sharded=True)
                    for name, value in values.items()
                }
                state["optimizer"][key] = own | elsewhere(self._trained_shapes(counts), own)
        return state

    def _trained_shapes(self, counts: bool) -> dict[str, tuple[int, ...]]:
        """Of the moments of all trained weights, on any stage; `counts`: of their step counts."""
        frozen = {"model.embed_tokens.weight"} if self._settings.model.freeze_embeddings else set()
        shapes = self._tensors.shapes
        return {name: () if counts else shape for name, shape in shapes.items() if name not in frozen}

    def load_state(self, state: TrainState) -> None:
        optimizer = {
            key: {name: local(value) for name, value in values.items() if not value.is_meta}
            for key, values in state["optimizer"].items()
        }
        super().load_state({**state, "optimizer": optimizer})  # type: ignore[typeddict-item]

    # -- memory -------------------------------------------------------------------------------------------------

    def _move_model(self, to_host: bool) -> None:
        if to_host:
            self._memory.offload()
        else:
            self._memory.onload()
        if isinstance(self._optimizer, StageAdamW):
            self._optimizer.rebind()
