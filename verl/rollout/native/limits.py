"""The keys of the rollout section the native engine lives within."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
