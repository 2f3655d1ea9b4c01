"""What training engines share whose passes are a `MicroBatchRunner`'s: passes, optimiser steps, state, offloading.

Whatever a method needs is brought back to the device first, wherever it was offloaded to.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.algorithms.aggregation import batch_counts
from verl.config.parallelism import layout_of
from verl.data.proto import DataProto
from verl.engines import budget
from verl.engines.base import EngineInfo, LossFn, TrainEngine, TrainState
from verl.engines.microbatch_runner import MicroBatchRunner
from verl.engines.offload import ModelMemory
from verl.engines.optim import MasterAdamW
from verl.engines.settings import EngineSettings
from verl.engines.sharding import EngineRanks
from verl.engines.weights import save_config, save_folder
from verl.errors import ConfigError, ModelError, TrainingHalted
from verl.models.fused_linear import HeadOptions
from verl.models.introspection import token_weights
from verl.models.value_model import ValueModel
from verl.observe.metrics import Metric, reduce_metrics

if TYPE_CHECKING:
    from verl.models.distillation import Teacher


class RunnerEngine(TrainEngine):
    """A model and its optimiser on one rank; without an optimiser a frozen model (the reference policy)."""

    same_rows: Any = None
    """The process group of ranks that work on the same rows; None where there are none."""

    def __init__(
        self,
        hf: nn.Module,
        settings: EngineSettings,
        ranks: EngineRanks,
        runner: MicroBatchRunner,
        memory: ModelMemory,
    ) -> None:
        """`hf`: the whole Hugging Face model; its parameters may be sharded or on the meta device."""
        self.info = engine_info(hf, settings, ranks, runner.packed)
        self.hf = hf
        self._memory = memory
        self._settings = settings
        self._ranks = ranks
        self._runner = runner
        self._optimizer = runner.optimizer
        self._guard = NonFiniteGuard(
            settings.kind, settings.max_skipped_steps, settings.bad_batch_dir, ranks.rank
        )
        self._offloaded: set[str] = set()

    @abstractmethod
    def gathered(self) -> AbstractContextManager[nn.Module]:
        """The Hugging Face module with all weights, for generating. Entering is collective."""

    def watching(self) -> AbstractContextManager[None]:
        """Turn a broken connection to a dead rank into a message that names it."""
        return self._ranks.watching()

    def _move_model(self, to_host: bool) -> None:
        """Parameters and buffers to host memory, or back."""
        if to_host:
            self._memory.offload()
        else:
            self._memory.onload()

    # -- passes -------------------------------------------------------------------------------------------------

    def log_probs(
        self,
        batch: DataProto,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, torch.Tensor]:
        options = HeadOptions(
            temperature=temperature, with_entropy=with_entropy, with_sum_pi_squared=with_sum_pi_squared
        )
        with self._pass(policy=True):
            return self._runner.forward(batch, options)

    def float32_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor | None:
        if self._settings.dtype == torch.float32:
            return self.log_probs(batch, temperature=temperature)["log_probs"]
        with self._pass(policy=True):
            return self._runner.float32_log_probs(batch, temperature)

    def values(self, batch: DataProto) -> torch.Tensor:
        with self._pass(policy=False):
            return self._runner.forward(batch, None)["values"]

    def forward_backward(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        teacher: Teacher | None = None,
    ) -> dict[str, Metric]:
        optimizer = self._trained()
        self._onload("model")
        batch = self._runner.checked(batch)
        options = HeadOptions(temperature=temperature, with_entropy=with_entropy)
        with self.watching():
            batch.meta_info = self._with_counts(batch)
            self._guard.remember(batch)
            before = budget.attention_graphs()
            metrics = self._runner.forward_backward(batch, loss_fn, options, teacher)
            metrics += budget.graphs_built(before)
            if "optimizer" not in self._offloaded:
                optimizer.prepare_step()  # before the host waits for the metrics
            return reduce_metrics(metrics)

    def optimizer_step(self, lr: float | None = None) -> dict[str, float]:
        optimizer = self._trained()
        self._onload("model", "optimizer")
        step, scale = optimizer.step_count, optimizer.loss_scale
        with self.watching():
            result = optimizer.step(lr)
        self._guard.after_step(result["skipped"] > 0, step, expected=optimizer.loss_scale < scale)
        return result

    def zero_grad(self) -> None:
        self._trained().zero_grad()

    def _with_counts(self, batch: DataProto) -> dict[str, Any]:
        """The denominators of the whole mini-batch over all ranks, unless the caller set them."""
        known = batch.meta_info
        counts: dict[str, Any] = {"dp_size": self.info.layout.dp}
        if "batch_num_tokens" not in known or "global_batch_size" not in known:
            mine = batch_counts(batch.batch["response_mask"])
            sums = self._ranks.total(list(mine.values()))
            same_rows = self.info.layout.model_ranks
            counts.update(zip(mine, (total // same_rows for total in sums), strict=True))
        return {**counts, **known}

    @contextmanager
    def _pass(self, policy: bool) -> Iterator[None]:
        """A pass without gradient of a `policy`, or of a model with one number per token."""
        if self._settings.scalar == policy:
            kind, wanted = (self._settings.kind, "log-probs") if policy else ("policy", "values")
            raise ModelError(f"the engine of a {kind} has no {wanted}")
        self._onload("model")
        with self.watching():
            yield

    def _trained(self) -> MasterAdamW:
        if self._optimizer is None:
            raise ConfigError("an engine of kind 'ref' is frozen and cannot train")
        return self._optimizer

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def bad_batch_dir(self) -> Path | None:
        return self._settings.bad_batch_dir

    def barrier(self) -> None:
        self._ranks.barrier()

    def save_hf(self, folder: Path) -> None:
        with self._all_ranks_saved():
            tensors, write = self.weights().named_tensors(), self._ranks.rank == 0
            save_folder(self.hf, tensors, Path(folder), self._settings.dtype, write=write)

    def save_hf_config(self, folder: Path) -> None:
        save_config(self.hf, Path(folder), self._settings.dtype)

    @contextmanager
    def _all_ranks_saved(self) -> Iterator[None]:
        with self.watching():
            try:
                yield
            finally:
                self._ranks.barrier()  # also where rank 0 could not write: the others are waiting in it

    def state(self) -> TrainState:
        state = TrainState(
            model={name: value.detach() for name, value in self.saved_weights().items()},
            optimizer={},
            scheduler={},
            extra={},
        )
        if self._optimizer:
            state["optimizer"] = self._optimizer.state()
            state["scheduler"] = {"step": self._optimizer.step_count}
            state["extra"] = {
                "skipped_in_a_row": self._guard.in_a_row,
                "loss_scale": self._optimizer.loss_scale,
            }
        return state

    @torch.no_grad()
    def load_state(self, state: TrainState) -> None:
        for name, value in self.saved_weights().items():
            if name not in state["model"]:
                raise ModelError(f"the checkpoint has no weight {name!r}, which this model needs")
            if not value.is_meta:  # else another rank has it
                value.copy_(state["model"][name])
        if self._optimizer is None:
            return
        self._optimizer.write_back()
        if state["optimizer"]:
            self._optimizer.load_state(state["optimizer"])
        if state["scheduler"]:
            self._optimizer.step_count = int(state["scheduler"]["step"])
        if state["extra"]:
            self._guard.in_a_row = int(state["extra"]["skipped_in_a_row"])
            self._optimizer.take_loss_scale(float(state["extra"]["loss_scale"]))

    # -- memory -------------------------------------------------------------------------------------------------

    def offload(self, model: bool = True, optimizer: bool = True) -> None:
        if model and "model" not in self._offloaded:
            self._move_model(to_host=True)
            self._offloaded.add("model")
        if optimizer and self._optimizer and "optimizer" not in self._offloaded:
            self._optimizer.move(torch.device("cpu"))
            self._offloaded.add("optimizer")

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        if model:
            self._onload("model")
        if optimizer:
            self._onload("optimizer")

    def _onload(self, *names: str) -> None:
        for name in self._offloaded.intersection(names):
            if name == "model":
                self._move_model(to_host=False)
            elif self._optimizer:
                self._optimizer.move(self._ranks.device)
            self._offloaded.discard(name)

    def close(self) -> None:
        if self._optimizer:
            self._optimizer.close()


def engine_info(model: Any, settings: EngineSettings, ranks: EngineRanks, packed: bool) -> EngineInfo:
    """What others may know of an engine with this Hugging Face model."""
    config = model.config.get_text_config()
    # A lookup is no matrix product; a tied matrix is multiplied with at the output.
    tied = bool(getattr(config, "tie_word_embeddings", False))
    lookup = None if tied or isinstance(model, ValueModel) else model.get_input_embeddings().weight
    counts = [(param, count) for param, count in token_weights(model, config) if param is not lookup]
    return EngineInfo(
        dtype=settings.dtype,
        device=ranks.device,
        rank=ranks.rank,
        layout=layout_of(settings.role, ranks.world_size),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        vocab_size=int(config.vocab_size),
        active_parameters=round(sum(count for _, count in counts)),
        frozen_parameters=round(sum(count for param, count in counts if not param.requires_grad)),
        packed=packed,
        lora_config=getattr(model, "verl_lora_config", None),
    )


log = logging.getLogger(__name__)


class NonFiniteGuard:
    """After a step skipped for a non-finite gradient: saves its batches for inspection, and halts the run after `limit`
    such steps in a row. Tensors are saved as safetensors and the rest as JSON: opening the files runs no code."""

    def __init__(self, name: str, limit: int, folder: Path | None, rank: int = 0) -> None:
        self.name, self.limit, self.folder, self.rank = name, limit, folder, rank
        self.in_a_row = 0
        self._batches: list[DataProto] = []

    def remember(self, batch: DataProto) -> None:
        """A batch whose gradient is in the step to come."""
        self._batches.append(batch)

    def after_step(self, skipped: bool, step: int, expected: bool = False) -> None:
        """`expected`: the skip lowered the loss scale of float16, which is normal."""
        batches, self._batches = self._batches, []
        if not skipped:
            self.in_a_row = 0
            return
        if expected:
            return
        self.in_a_row += 1
        where = "the batch was not saved"
        if self.folder and batches:
            try:
                saved = [str(self._save(batch, step, at)) for at, batch in enumerate(batches)]
                where = f"the batch is saved as {', '.join(saved)}"
            except Exception as error:  # a full disk must not stop the run
                where = f"the batch could not be saved ({error})"
        log.warning(
            "%s: non-finite gradient in optimiser step %d, update skipped; %s",
            self.name,
            step,
            where,
        )
        if self.in_a_row >= self.limit:
            raise TrainingHalted(
                f"{self.name}: {self.in_a_row} optimiser steps in a row had a non-finite gradient "
                f"(trainer.health.max_skipped_steps={self.limit}); {where}. Check it for extreme advantages or "
                "log-probs; a lower optim.lr or grad_clip often helps"
            )

    def _save(self, batch: DataProto, step: int, at: int) -> Path:
        from safetensors.torch import save_file

        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"nonfinite_{self.name}_step{step}_rank{self.rank}_{self.in_a_row}_{at}"
        file = self.folder / f"{stem}.safetensors"
        save_file({name: value.contiguous().cpu() for name, value in batch.batch.items()}, file)
        other = {
            "meta_info": batch.meta_info,
            "rows": {name: list(values) for name, values in batch.non_tensor_batch.items()},
        }
        (self.folder / f"{stem}.json").write_text(json.dumps(other, default=_plain))
        return file


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)
