"""Where an engine that generates in place finds its weights: a TrainEngine or a plain module.

What always holds: whatever generation changes about the module (training mode, attention implementation) is
put back on the way out, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from verl.errors import RolloutError
from verl.models.attention import ATTENTION_NAME, register_attention


@contextmanager
def whole_module(source: Any) -> Iterator[nn.Module]:
    """The module with whole weights: `source.full_parameters()` of a TrainEngine, or the module itself."""
    if hasattr(source, "full_parameters"):
        with source.full_parameters() as module:
            yield module
    elif isinstance(source, nn.Module):
        yield source
    else:
        raise RolloutError(
            f"cannot generate from a {type(source).__name__}; "
            "give a TrainEngine (with full_parameters) or an nn.Module"
        )


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
    """The causal model in evaluation mode with another attention implementation (None: transformers' own)."""
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
