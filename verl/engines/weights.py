"""The weights of a training engine, for rollout engines and as a Hugging Face folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.data.proto import DataProto
from verl.models.introspection import class_of
from verl.models.value_model import ValueModel
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
from verl.runtime import quiet_transformers

if TYPE_CHECKING:
    from verl.engines.base import TrainEngine
    from verl.engines.ranks import Ranks


class FSDPWeights(WeightSource):
    """Shards are gathered one weight at a time; `module` gathers all of them."""

    def __init__(
        self,
        engine: TrainEngine,
        model: nn.Module,
        ranks: Ranks,
        gather: Callable[[], AbstractContextManager[nn.Module]],
    ) -> None:
        """`gather`: a context with the whole model, for generating."""
        self._engine, self._model, self._ranks, self._gather = engine, model, ranks, gather
        self.dtype, self.device = engine.info.dtype, engine.info.device

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._ranks.watching():
            yield from merged_tensors(self._model, self.dtype, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._ranks.watching():
            yield from base_tensors(self._model, self.dtype, names)

    def adapter(self) -> Adapter | None:
        return adapter_of(self._model, self.dtype)

    def module(self) -> AbstractContextManager[nn.Module]:
        return self._gather()

    def structure(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._model)

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> SourceLogProbs:
        ids = torch.tensor([[*prompt_ids, *response] for response in responses])
        mask = torch.ones(len(responses), len(responses[0]), dtype=torch.int64)
        batch = DataProto.from_dict(
            tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        )
        log_probs = self._engine.log_probs(batch)["log_probs"]
        exact = self._engine.float32_log_probs(batch)
        return SourceLogProbs(log_probs.tolist(), None if exact is None else exact.tolist())


def save_folder(model: Any, folder: Path, dtype: torch.dtype, write: bool) -> None:
    """Weights as safetensors, config and generation config. Every rank calls it, one has `write`."""
    weights = {}
    for name, value in merged_tensors(model, dtype, names="module"):
        if write:
            weights[name] = value.cpu().clone() if value.device.type == "cpu" else value.cpu()
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(weights, folder, max_shard_size="5GB")
        model.save_config(folder)
        return
    for name, target in (getattr(model, "_tied_weights_keys", None) or {}).items():
        if model.config.tie_word_embeddings and name in weights and target in weights:
            del weights[name]
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)


def save_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """config.json (with the precision the model computes in) and generation_config.json, without touching the model."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        model.save_config(folder)
    else:
        config = copy.deepcopy(model.config)
        config._attn_implementation = None
        config.architectures = [class_of(model).__name__]
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
