"""Write an engine's model as a Hugging Face folder; every rank calls it, one writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from verl.models.quiet import quiet_transformers
from verl.models.value_model import ValueModel
from verl.models.weight_source import merged_tensors


def save_folder(model: Any, folder: Path, dtype: torch.dtype, write: bool) -> None:
    """Write the model as Hugging Face does (safetensors, config, generation config). Every rank calls it."""
    weights = {}
    for name, value in merged_tensors(model, dtype, names="module"):
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


def save_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """config.json (with the precision the model computes in) and generation_config.json, without touching the model."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        model.save_config(folder)
    else:
        config = copy.deepcopy(model.config)
        config._attn_implementation = None
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # as `fully_shard` renames classes
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
