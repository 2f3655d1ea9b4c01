"""The keys of the rollout section the native engine lives within."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.dtypes import torch_dtype


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = False
    dtype: str = "auto"
    max_model_len: int | None = None
    cache_tokens: int | None = None
    """Size of the KV cache in tokens; None: from memory."""

    @staticmethod
    def of(config: Any | None) -> Limits:
        """From the rollout section, or anything with some of these attributes."""
        names = Limits.__dataclass_fields__
        return Limits(**{name: getattr(config, name) for name in names if hasattr(config, name)})

    @property
    def fp8(self) -> bool:
        return self.dtype == "fp8"

    def check_dtype(self, weights: torch.dtype) -> None:
        """The native engine generates from the trainer's own tensors: their type, or fp8 made from them."""
        if (
            self.dtype in ("auto", "fp8")
            or torch_dtype(self.dtype, "rollout.dtype", ("auto", "fp8")) == weights
        ):
            return
        raise ConfigError(
            f"rollout.dtype={self.dtype}, but the model's weights are {str(weights).removeprefix('torch.')} and "
            "rollout.name=native generates from these very tensors; use rollout.dtype=auto (or fp8), or give the "
            "model that type (actor_rollout_ref.model.dtype)"
        )
