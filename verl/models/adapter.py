"""Merge a LoRA adapter on disk into a model, for generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.errors import ModelError
from verl.json_input import read_json
from verl.models.lora import merge_lora

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_UNSUPPORTED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
)


def merge_adapter(model: nn.Module, folder: Path) -> int:
    """Add the adapter's products to the model's weights, in place; how many weights were changed. Refused unless every
    tensor of the adapter can be used."""
    settings = _settings(folder)
    tensors = _tensors(folder)
    scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"])
    names = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    unused = [name for name in tensors if not name.endswith((_A, _B)) or name[: -len(_A)] not in names]
    if unused:
        raise ModelError(f"the adapter {folder} holds {unused[0]!r}, which is no LoRA pair of a linear layer")
    weights = dict(model.named_parameters())
    transpose = bool(settings.get("fan_in_fan_out"))
    for name in sorted(names):
        plain = name.removeprefix(_PREFIX)
        weight, lora_a, lora_b = weights.get(f"{plain}.weight"), tensors[name + _A], tensors.get(name + _B)
        if weight is None or lora_b is None:
            raise ModelError(
                f"the adapter {folder} changes {plain!r}, which {type(model).__name__} does not have; was it trained "
                "on another model?"
            )
        shape = (lora_b.shape[0], lora_a.shape[1])
        if tuple(weight.shape) != (shape[::-1] if transpose else shape):
            raise ModelError(
                f"the adapter {folder} has shape {shape} for {plain!r}, the model {tuple(weight.shape)}; was it "
                "trained on another model?"
            )
        with torch.no_grad():
            weight.copy_(merge_lora(weight, lora_a, lora_b, scale, transpose=transpose))
    return len(names)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = read_json(folder / "adapter_config.json")
        rank, _ = int(settings["r"]), float(settings["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'adapter_config.json'} cannot be understood: {error!r}") from error
    special = [name for name in _UNSUPPORTED if settings.get(name)]
    if rank < 1 or special:
        raise ModelError(
            f"the adapter {folder} uses {special[0] if special else f'r={rank}'}, which cannot be merged here; merge "
            "it with peft (merge_and_unload) and set model.path to the result"
        )
    return settings


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"no adapter can be read from {path}: {error}") from error
