"""Whole weights out of an engine's model: as an iterator, as a Hugging Face folder.

What always holds: every rank iterates in step (shards are gathered one weight at a time), rank 0 alone writes;
LoRA adapters are merged in; a folder appears complete or not at all readable as one (weights first, config last).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from verl.models.lora import merged_weights
from verl.models.quiet import quiet_transformers
from verl.models.value_model import ValueModel


def whole_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight in the precision the model computes with. Tied weights come under each of their names, because
    an engine that keeps its own copy of the output matrix would otherwise keep a stale one."""
    for name, value in merged_weights(model):
        yield name, value.to(dtype) if value.is_floating_point() else value


def exported_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The same under the names of the model's files. Where transformers joins tensors on loading (the experts of a
    mixture), they come apart again, because that is what other engines read."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, value in whole_weights(model, dtype):
        if isinstance(model, ValueModel):
            yield name, value
        else:
            yield from revert_weight_conversion(model, {name: value}).items()


def save_folder(model: Any, folder: Path, dtype: torch.dtype, write: bool) -> None:
    """Write the model as Hugging Face does (safetensors, config, generation config). Every rank calls it."""
    weights = {}
    for name, value in whole_weights(model, dtype):
        if write:
            weights[name] = value.cpu().clone() if value.device.type == "cpu" else value.cpu()
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        _save_value_model(model, weights, folder)
        return
    _save_causal_lm(model, weights, folder)


def _save_causal_lm(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    for name, target in (getattr(model, "_tied_weights_keys", None) or {}).items():
        if model.config.tie_word_embeddings and name in weights and target in weights:
            del weights[name]
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)


def _save_value_model(model: ValueModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size="5GB")
    model.save_config(folder)
