"""The training engine on PyTorch's own means: packed micro-batches, fused head, FSDP2 over any number of ranks.

What always holds: outputs and gradients do not depend on the cut into micro-batches or ranks; with one rank
nothing is sharded or copied, the module's parameters are plain tensors that others may share, and they are only
ever written in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.algorithms.aggregation import batch_counts
from verl.data.proto import DataProto
from verl.engines.base import EngineInfo, Layout, LossFn, TrainEngine
from verl.engines.export import save_config, save_folder
from verl.engines.guard import NonFiniteGuard
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.offload import ModelMemory
from verl.engines.optim import MasterAdamW
from verl.engines.ranks import Ranks
from verl.engines.settings import EngineSettings
from verl.engines.sharding import gathered
from verl.engines.weights import FSDPWeights
from verl.engines.whole_copy import WholeCopy
from verl.errors import ConfigError, ModelError
from verl.models.fused_linear import HeadOptions
from verl.models.lora import adapters_off, has_lora, save_adapter
from verl.models.sizes import token_weights
from verl.models.value_model import ValueModel
from verl.observe.metrics import Metric, reduce_metrics

log = logging.getLogger(__name__)


class FSDPEngine(TrainEngine):
    """A model and its optimiser on one rank; without an optimiser a frozen model (the reference policy).

    `verl.engines.build` prepares the parts; this class gives them the engine's verbs."""

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        ranks: Ranks,
        passes: MicroBatchRunner,
        optimizer: MasterAdamW | None,
        *,
        sharded: bool,
        whole_copy: WholeCopy | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.ranks = ranks
        self.info = _info(model, settings, ranks)
        self.passes = passes
        self.optimizer = optimizer
        self.sharded = sharded
        self.whole_copy = whole_copy
        self.guard = NonFiniteGuard(
            settings.kind, settings.max_skipped_steps, settings.bad_batch_dir, ranks.rank
        )
        self._memory = ModelMemory(model, ranks.device, sharded)
        self._away: set[str] = set()

    # -- passes -------------------------------------------------------------------------------------------------

    def log_probs(
        self,
        batch: DataProto,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, torch.Tensor]:
        self._need(policy=True)
        options = HeadOptions(
            temperature=temperature, with_entropy=with_entropy, with_sum_pi_squared=with_sum_pi_squared
        )
        self._bring("model")
        with self.ranks.watching():
            return self.passes.answers(batch, options)

    def float32_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor | None:
        if self.settings.dtype == torch.float32:
            return self.log_probs(batch, temperature=temperature)["log_probs"]
        self._need(policy=True)
        self._bring("model")
        with self.ranks.watching():
            return self.passes.float32_log_probs(batch, temperature)

    def values(self, batch: DataProto) -> torch.Tensor:
        self._need(policy=False)
        self._bring("model")
        with self.ranks.watching():
            return self.passes.answers(batch, None)["values"]

    def reference_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor:
        if not has_lora(self.model):
            raise ConfigError(
                "the reference policy is the actor without adapters only when there are adapters; set "
                "model.lora_rank, or build an engine of kind 'ref'"
            )
        with adapters_off(self.model):
            return self.log_probs(batch, temperature=temperature)["log_probs"]

    def forward_backward(
        self, batch: DataProto, loss_fn: LossFn, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> dict[str, Metric]:
        optimizer = self._trained()
        self._bring("model")
        batch = self.passes.checked(batch)
        with self.ranks.watching():
            batch.meta_info = self._with_counts(batch)
            before = optimizer.gradient_snapshot()
            self.guard.remember(batch)
            parts = self.passes.train(
                batch,
                loss_fn,
                HeadOptions(temperature=temperature, with_entropy=with_entropy),
                loss_scale=optimizer.loss_scale,
                start_over=lambda: optimizer.restore_gradients(before),
            )
        return reduce_metrics(parts)

    def optimizer_step(self) -> dict[str, float]:
        optimizer = self._trained()
        self._bring("model", "optimizer")
        at = optimizer.step_count
        scale = optimizer.loss_scale
        with self.ranks.watching():
            result = optimizer.step()
        self.guard.after_step(result["skipped"] > 0, at, expected=optimizer.loss_scale < scale)
        return result

    def _with_counts(self, batch: DataProto) -> dict[str, Any]:
        """The denominators of the whole mini-batch over all ranks, unless the caller gave them."""
        given = batch.meta_info
        counts: dict[str, Any] = {"dp_size": self.info.layout.dp}
        if "batch_num_tokens" not in given or "global_batch_size" not in given:
            own = batch_counts(batch.batch["response_mask"])
            names = ("batch_num_tokens", "global_batch_size")
            totals = self.ranks.total([int(own[name]) for name in names])
            counts.update(zip(names, totals, strict=True))
        return {**counts, **given}

    def _need(self, policy: bool) -> None:
        if isinstance(self.model, ValueModel) == policy:
            held = "a critic" if policy else "a policy"
            asked = "log-probabilities" if policy else "values"
            raise ModelError(f"this engine holds {held} and cannot give {asked}")

    def _trained(self) -> MasterAdamW:
        if self.optimizer is None:
            raise ConfigError("an engine of kind 'ref' is frozen and cannot train")
        return self.optimizer

    # -- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        self._bring("model")
        if not self.sharded:
            yield self.model.eval()
            return
        copy = self.whole_copy
        whole = copy.hold() if copy else gathered(self.model.eval(), self.settings.sharding)
        with self.ranks.watching(), whole as module:
            yield module

    def weights(self) -> FSDPWeights:
        return FSDPWeights(self)

    def barrier(self) -> None:
        self.ranks.barrier()

    def save_hf(self, folder: Path) -> None:
        with self.ranks.watching():
            try:
                save_folder(self.model, Path(folder), self.settings.dtype, write=self.ranks.rank == 0)
            finally:
                self.ranks.barrier()  # also where rank 0 could not write: the others are on their way there

    def save_hf_config(self, folder: Path) -> None:
        save_config(self.model, Path(folder), self.settings.dtype)

    def save_adapter(self, folder: Path) -> None:
        """The LoRA adapter alone, as peft opens it (rank 0 writes)."""
        if not has_lora(self.model):
            raise ConfigError("there is no adapter to save; set model.lora_rank")
        with self.ranks.watching():
            try:
                save_adapter(self.model, Path(folder), write=self.ranks.rank == 0)
            finally:
                self.ranks.barrier()

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: masters where there are some, tied weights once; under LoRA, what is trained."""
        masters = self.optimizer.masters if self.optimizer else {}
        if has_lora(self.model):
            return dict(masters)
        seen: set[int] = set()
        own = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                own[name] = masters.get(name, value)
        return own

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": {name: value.detach() for name, value in self._own_weights().items()},
            "optimizer": {},
            "scheduler": {},
            "extra": {},
        }
        if self.optimizer:
            state["optimizer"] = self.optimizer.state_dict()
            state["scheduler"] = {"step": self.optimizer.step_count}
            state["extra"] = {
                "skipped_in_a_row": self.guard.in_a_row,
                "loss_scale": self.optimizer.loss_scale,
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._own_weights().items():
            if name not in state["model"]:
                raise ModelError(f"the checkpoint has no weight {name!r}, which this model needs")
            value.copy_(state["model"][name])
        if self.optimizer is None:
            return
        self.optimizer.write_back()
        if state.get("optimizer"):
            self.optimizer.load_state_dict(state["optimizer"])
        if state.get("scheduler"):
            self.optimizer.step_count = int(state["scheduler"]["step"])
        if state.get("extra"):
            self.guard.in_a_row = int(state["extra"]["skipped_in_a_row"])
            self.optimizer.take_loss_scale(float(state["extra"]["loss_scale"]))

    # -- memory -------------------------------------------------------------------------------------------------

    def offload(self, model: bool = True, optimizer: bool = True) -> None:
        if model and "model" not in self._away:
            self._memory.leave()
            self._away.add("model")
        if optimizer and self.optimizer and "optimizer" not in self._away:
            self.optimizer.move(torch.device("cpu"))
            self._away.add("optimizer")

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        if model:
            self._bring("model")
        if optimizer:
            self._bring("optimizer")

    def _bring(self, *parts: str) -> None:
        """Make sure that what a verb works with is on the device."""
        for part in self._away.intersection(parts):
            if part == "model":
                self._memory.enter()
            elif self.optimizer:
                self.optimizer.move(self.ranks.device)
            self._away.discard(part)

    def close(self) -> None:
        if self.optimizer:
            self.optimizer.close()


def _info(model: Any, settings: EngineSettings, ranks: Ranks) -> EngineInfo:
    config = model.config.get_text_config()
    # A lookup is no matrix product; a tied matrix is multiplied with at the output.
    tied = bool(getattr(config, "tie_word_embeddings", False))
    lookup = None if tied or isinstance(model, ValueModel) else model.get_input_embeddings().weight
    counts = [(param, count) for param, count in token_weights(model, config) if param is not lookup]
    return EngineInfo(
        dtype=settings.dtype,
        device=ranks.device,
        rank=ranks.rank,
        layout=Layout(dp=ranks.world_size),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        vocab_size=int(config.vocab_size),
        active_parameters=round(sum(count for _, count in counts)),
        frozen_parameters=round(sum(count for param, count in counts if not param.requires_grad)),
        lora_config=getattr(model, "verl_lora_config", None),
    )
