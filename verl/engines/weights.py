"""The weights of a training engine as rollout engines and checkpoints take them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.data.proto import DataProto
from verl.models.weight_source import (
    Adapter,
    NamedTensors,
    Names,
    SourceLogProbs,
    WeightSource,
    adapter_of,
    base_tensors,
    merged_tensors,
)

if TYPE_CHECKING:
    from verl.engines.fsdp import FSDPEngine


class FSDPWeights(WeightSource):
    """Shards are gathered one weight at a time; `module` gathers all of them."""

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine = engine
        self.dtype, self.device = engine.settings.dtype, engine.ranks.device

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._engine.ranks.watching():
            yield from merged_tensors(self._engine.model, self.dtype, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._engine.ranks.watching():
            yield from base_tensors(self._engine.model, self.dtype, names)

    def adapter(self) -> Adapter | None:
        return adapter_of(self._engine.model, self.dtype)

    def module(self) -> AbstractContextManager[nn.Module]:
        return self._engine.full_parameters()

    def structure(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._engine.model)

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> SourceLogProbs:
        ids = torch.tensor([[*prompt_ids, *response] for response in responses])
        mask = torch.ones(len(responses), len(responses[0]), dtype=torch.int64)
        batch = DataProto.from_dict(
            tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        )
        log_probs = self._engine.log_probs(batch)["log_probs"]
        exact = self._engine.float32_log_probs(batch)
        return SourceLogProbs(log_probs.tolist(), None if exact is None else exact.tolist())
