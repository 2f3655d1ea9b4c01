"""Plain modules as weight sources, and a module's state while it generates."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from verl.errors import RolloutError
from verl.models.attention import ATTENTION_NAME, register_attention
from verl.models.float32 import FAULTS, first_line, float32_arithmetic
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

log = logging.getLogger(__name__)


class ModuleWeights(WeightSource):
    """The weights of a plain causal language model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        weight = causal_lm(module).get_input_embeddings().weight
        self.dtype, self.device = weight.dtype, weight.device

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        return merged_tensors(causal_lm(self._module), self.dtype, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        return base_tensors(causal_lm(self._module), self.dtype, names)

    def adapter(self) -> Adapter | None:
        return adapter_of(causal_lm(self._module), self.dtype)

    def module(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._module)

    def structure(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._module)

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> SourceLogProbs:
        with torch.no_grad(), generation_mode(self._module, None) as model:
            log_probs = _log_probs(model, prompt_ids, responses)
            try:
                with float32_arithmetic(model):
                    return SourceLogProbs(log_probs, _log_probs(model, prompt_ids, responses))
            except FAULTS as error:
                log.info("rounding noise of log-probs cannot be measured in float32: %s", first_line(error))
                return SourceLogProbs(log_probs, None)


def _log_probs(model: Any, prompt: Sequence[int], rows: Sequence[Sequence[int]]) -> list[list[float]]:
    ids = torch.tensor([[*prompt, *row] for row in rows], device=model.get_input_embeddings().weight.device)
    logits_BTV = model(ids, use_cache=False).logits[:, len(prompt) - 1 : -1].float()
    return logits_BTV.log_softmax(-1).gather(2, ids[:, len(prompt) :, None])[..., 0].tolist()


def as_source(source: WeightSource | nn.Module) -> WeightSource:
    """A module handed in by a user is a source of its own weights."""
    return source if isinstance(source, WeightSource) else ModuleWeights(source)


def causal_lm(module: nn.Module) -> Any:
    """The Hugging Face causal language model inside wrappers such as PEFT's."""
    inner: Any = module
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return inner


def stock_attention(model: Any) -> str:
    """transformers' own attention for this model: SDPA, or eager where the model has no SDPA form."""
    return "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"


def _require_exchangeable_attention(model: Any) -> None:
    register_attention()
    if not getattr(model, "_supports_attention_backend", False):
        raise RolloutError(
            f"{type(model).__name__} does not call its attention through transformers' attention interface, which "
            "rollout.name=native needs; use rollout.name=hf"
        )


@contextmanager
def generation_mode(module: nn.Module, attention: str | None) -> Iterator[Any]:
    """The causal model in evaluation mode with another attention implementation (None: transformers' own); both are
    restored on exit."""
    model = causal_lm(module)
    attention = attention or stock_attention(model)
    if attention == ATTENTION_NAME:
        _require_exchangeable_attention(model)
    training = [part for part in module.modules() if part.training]
    before = getattr(model.config, "_attn_implementation", None)
    module.eval()
    try:
        if before != attention:
            model.set_attn_implementation(attention)
        yield model
    finally:
        if before is not None and before != attention:
            model.set_attn_implementation(before)
        for part in training:
            part.training = True
