"""The interface of a training engine. Sharding, packing, precision and memory stay inside the engine.

A batch is a DataProto whose tensors are padded: `input_ids` [B, L] and `attention_mask` [B, L] (left and
right padding allowed), and `response_mask` [B, T] (1 = token to learn from). The last T columns of
`input_ids` are the response; T may equal L (supervised fine-tuning), then the first column's mask is 0,
because nothing predicts it. Outputs are [B, T], aligned with `response_mask` and zero where it is 0.

`meta_info["rows_together"]` (default 1): so many consecutive rows, e.g. of a preference pair, stay in one
micro-batch. Where sequences are packed, the common beginnings of rows are computed once (`model.share_prefixes`).

Outputs and gradients do not depend on how the batch is split into micro-batches, packed or spread over ranks. A loss
function must therefore normalise by the counts of the whole mini-batch, which it reads from `micro_batch.meta_info`:
`batch_num_tokens` (policy tokens, all ranks), `global_batch_size` (sequences, all ranks) and `dp_size`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from verl.config.parallelism import Layout
from verl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from verl.data.proto import DataProto
    from verl.models.distillation import Teacher
    from verl.models.introspection import OutputHead
    from verl.models.weight_source import WeightSource
    from verl.observe.metrics import Metric


@dataclass
class ModelOutput:
    """Of one micro-batch; each is [b, T] with gradient, or None where not asked for."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    kl: torch.Tensor | None = None


LossFn = Callable[["ModelOutput", "DataProto"], "tuple[torch.Tensor, dict[str, Metric]]"]
"""Gets the outputs and the micro-batch they belong to; returns the micro-batch's share of the loss and metrics."""


@dataclass(frozen=True)
class EngineInfo:
    """What code outside the engine may know of it."""

    dtype: torch.dtype
    """What the model computes with; master weights may be wider."""
    device: torch.device
    rank: int
    """Of this process among those that share the model."""
    layout: Layout
    hidden_size: int
    num_layers: int
    vocab_size: int
    active_parameters: int
    """That take part in matrix products for each token (of a mixture: the experts a token is sent to)."""
    frozen_parameters: int
    """Those of `active_parameters` that get no gradient (under LoRA, the base model's)."""
    packed: bool = True
    """Whether micro-batches are packed; if not, they are padded."""
    lora_config: Any = None
    """peft's `LoraConfig`; None without adapters."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size


class TrainState(TypedDict):
    """What a checkpoint holds of an engine: tensors (DTensors where sharded; on the meta device where only other ranks
    have them) by name, and plain values."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    """By kind (`exp_avg`, `exp_avg_sq`, `step`, `momentum`), then by parameter name; empty without an optimiser."""
    scheduler: dict[str, int]
    extra: dict[str, Any]


class TrainEngine(ABC):
    """A model, its optimiser and schedule, on one rank."""

    info: EngineInfo

    def _no_adapters(self) -> ConfigError:
        name = type(self).__name__
        return ConfigError(
            f"{name} has no LoRA adapters; set strategy=fsdp for this role, or model.lora_rank=0"
        )

    @abstractmethod
    def log_probs(
        self,
        batch: DataProto,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Without gradient: `log_probs` and, where asked, `entropy` and `sum_pi_squared`; each [B, T] on the CPU."""

    def float32_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor | None:
        """`log_probs` of a few short rows with float32 arithmetic, whatever the precision of the weights; None where
        the engine cannot. Collective."""
        return None

    @abstractmethod
    def values(self, batch: DataProto) -> torch.Tensor:
        """Without gradient: the value head's output before each response token, [B, T] on the CPU."""

    def teacher_outputs(
        self,
        batch: DataProto,
        *,
        vocabulary: int,
        top_k: int | None = None,
        temperature: float = 1.0,
        below_adapters: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Without gradient, on the CPU: what a student's `forward_backward` needs of this model (or of what is below
        its adapters) as its teacher, for each response token: hidden states, or the `top_k` most probable of the first
        `vocabulary` tokens."""
        raise ConfigError(f"{type(self).__name__} cannot be a teacher; set strategy=fsdp")

    def output_head(self) -> OutputHead:
        """The whole output matrix, on this rank's device. Collective."""
        raise ConfigError(f"{type(self).__name__} cannot be a teacher; set strategy=fsdp")

    @abstractmethod
    def forward_backward(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        teacher: Teacher | None = None,
    ) -> dict[str, Metric]:
        """Add the gradients of one mini-batch; the metrics of its micro-batches are joined (`reduce_metrics`). With a
        `teacher`, whose `teacher_outputs` are in the batch, the loss gets `kl`."""

    @abstractmethod
    def optimizer_step(self, lr: float | None = None) -> dict[str, float]:
        """Clip, check that gradients are finite, step, advance the schedule, clear gradients. `lr`: for this step,
        instead of the schedule's.

        Returns `grad_norm`, `lr` (the one used) and `skipped` (1.0 when the gradient was not finite and the
        weights were left as they were)."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients that were added since the last step."""

    @abstractmethod
    def weights(self) -> WeightSource:
        """The current weights, for rollout engines and exports."""

    @property
    def bad_batch_dir(self) -> Path | None:
        """Where data that ended the run is saved."""
        return None

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks of this engine."""

    def reference_log_probs(self, batch: DataProto, *, temperature: float = 1.0) -> torch.Tensor:
        """[B, T] under the weights before LoRA adapters (adapters off), or with the adapters of the last
        `refresh_reference`. An error without adapters."""
        raise self._no_adapters()

    def refresh_reference(self) -> None:
        """Keep a copy of the LoRA adapters as they are now, which `reference_log_probs` uses from here on and which
        checkpoints hold. An error without adapters."""
        raise self._no_adapters()

    @abstractmethod
    def saved_weights(self) -> dict[str, torch.Tensor]:
        """The entry `model` of `state`, by name: masters where there are some, tied weights once; under LoRA, what is
        trained."""

    @abstractmethod
    def state(self) -> TrainState:
        """Tensors are the engine's own, not copies; an optimiser that has not stepped yet allocates its moments."""

    @abstractmethod
    def load_state(self, state: TrainState) -> None:
        """Take back what `state` returned, in place, bit for bit."""

    @abstractmethod
    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights as safetensors, config, generation config (rank 0 writes)."""

    @abstractmethod
    def save_hf_config(self, folder: Path) -> None:
        """Write only config and generation config, as `save_hf` does, on the rank that calls it."""

    def save_adapter(self, folder: Path) -> None:
        """Write the LoRA adapter alone, as peft opens it (rank 0 writes). An error without adapters."""
        raise self._no_adapters()

    def offload(self, model: bool = True, optimizer: bool = True) -> None:  # noqa: B027  an engine may have nothing to do
        """Move parameters and optimiser state to host memory until `onload`."""

    def onload(self, model: bool = True, optimizer: bool = True) -> None:  # noqa: B027  an engine may have nothing to do
        """Bring them back."""

    def close(self) -> None:  # noqa: B027  an engine may have nothing to do
        """Release everything."""
