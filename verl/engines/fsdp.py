"""The FSDP2 training engine; with one rank a plain module, nothing sharded.

Parameters are always the same objects, so that every user of them (the native rollout engine) sees each update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.data.proto import DataProto
from verl.engines.adamw import local
from verl.engines.base import TrainState
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.offload import ModelMemory
from verl.engines.runner_engine import RunnerEngine
from verl.engines.settings import EngineSettings
from verl.engines.sharding import EngineRanks, unsharded
from verl.engines.weights import FSDPWeights, GatheredCopy
from verl.errors import ConfigError
from verl.models.fused_linear import HeadOptions
from verl.models.introspection import OutputHead, output_head
from verl.models.lora import adapters_off, has_lora, save_adapter


class FSDPEngine(RunnerEngine):
    """Built by `verl.engines.build`."""

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        ranks: EngineRanks,
        runner: MicroBatchRunner,
        *,
        sharded: bool,
        gathered_copy: GatheredCopy | None = None,
    ) -> None:
        super().__init__(model, settings, ranks, runner, ModelMemory(model, ranks.device, sharded))
        self._model = model
        self.same_rows = None if runner.sequence is None else runner.sequence.group
        self._sharded = sharded
        self._gathered_copy = gathered_copy
        self._reference: dict[str, torch.Tensor] | None = None

    def reference_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor:
        self._need_adapters("the actor is not its own reference policy")
        reference = adapters_off(self._model) if self._reference is None else self._swapped(self._reference)
        with reference:
            return self.log_probs(batch, temperature=temperature)["log_probs"]

    def refresh_reference(self) -> None:
        self._need_adapters("there is nothing to copy")
        self._onload("model")
        self._reference = self._copied_adapters()

    def _need_adapters(self, why: str) -> None:
        if not has_lora(self._model):
            raise ConfigError(
                f"without adapters {why}; set model.lora_rank, or build an engine of kind 'ref'"
            )

    def _copied_adapters(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self._trained().params.items()}

    @contextmanager
    def _swapped(self, adapters: dict[str, torch.Tensor]) -> Iterator[None]:
        """The model with other adapters while the context lasts; masters and moments are not touched."""
        self._onload("model")
        own, params = self._copied_adapters(), self._trained().params

        def put(adapters: dict[str, torch.Tensor]) -> None:
            for name, param in params.items():
                local(param.detach()).copy_(local(adapters[name]))

        put(adapters)
        try:
            yield
        finally:
            put(own)

    def teacher_outputs(
        self,
        batch: DataProto,
        *,
        vocabulary: int,
        top_k: int | None = None,
        temperature: float = 1.0,
        below_adapters: bool = False,
    ) -> dict[str, torch.Tensor]:
        from verl.models.distillation import teacher_forward

        options = HeadOptions(temperature=temperature)
        with self._pass(policy=True), adapters_off(self._model) if below_adapters else nullcontext():
            return self._runner.forward(
                batch, options, partial(teacher_forward, vocabulary=vocabulary, top_k=top_k, options=options)
            )

    @torch.no_grad()
    def output_head(self) -> OutputHead:
        self._onload("model")
        # Gathered memory is freed, and idle parameters may be moved: then it has to be a copy.
        moved = self._sharded or self._settings.role.fsdp_config.param_offload

        def copied(model: Any) -> dict[str, torch.Tensor]:
            head = output_head(model)
            found = (
                {"weight": head.weight} if head.bias is None else {"weight": head.weight, "bias": head.bias}
            )
            return {name: x.detach().clone() if moved else x.detach() for name, x in found.items()}

        with self.watching():
            found = self._model.verl_run(copied)
            self._runner.reshard()
        return replace(output_head(self._model), weight=found["weight"], bias=found.get("bias"))

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        self._onload("model")
        if not self._sharded:
            yield self._model.eval()
            return
        copy = self._gathered_copy
        gathered = copy.gathered() if copy else unsharded(self._model.eval(), self._settings.role.fsdp_config)
        with self.watching(), gathered as module:
            yield module

    def weights(self) -> FSDPWeights:
        return FSDPWeights(self)

    def save_adapter(self, folder: Path) -> None:
        if not has_lora(self._model):
            raise ConfigError("there is no adapter to save; set model.lora_rank")
        with self._all_ranks_saved():
            save_adapter(self._model, Path(folder), write=self._ranks.rank == 0)

    def saved_weights(self) -> dict[str, torch.Tensor]:
        masters = self._optimizer.masters if self._optimizer else {}
        if has_lora(self._model):
            return dict(masters)
        seen: set[int] = set()
        saved = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                saved[name] = masters.get(name, value)
        return saved

    def state(self) -> TrainState:
        state = super().state()
        if self._reference is not None:
            state["extra"]["reference"] = dict(self._reference)
        return state

    @torch.no_grad()
    def load_state(self, state: TrainState) -> None:
        super().load_state(state)
        if self._reference is not None and "reference" in state["extra"]:
            for name, value in self._reference.items():
                value.copy_(state["extra"]["reference"][name])
