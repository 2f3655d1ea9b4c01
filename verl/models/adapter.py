"""A LoRA adapter on disk merged into a model: for generating, where nobody trains it any further.

What always holds: every tensor of the adapter is used, or the merge is refused; the sum is taken in float32 and then
rounded once, as the training engine does when it hands merged weights over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl.errors import ModelError
from verl.json_input import read_json

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_CANNOT = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "lora_bias")


def merge_adapter(model: nn.Module, folder: Path) -> int:
    """Add the adapter's products to the model's weights, in place; how many weights were changed."""
    settings = _settings(folder)
    tensors = _tensors(folder)
    scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"])
    names = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    unused = [name for name in tensors if not name.endswith((_A, _B)) or name[: -len(_A)] not in names]
    if unused:
        raise ModelError(f"the adapter {folder} holds {unused[0]!r}, which is no LoRA pair of a linear layer")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted(names):
            weight = weights.get(f"{name.removeprefix(_PREFIX)}.weight")
            low, up = tensors[name + _A], tensors.get(name + _B)
            if weight is None or up is None:
                raise ModelError(
                    f"the adapter {folder} changes {name.removeprefix(_PREFIX)!r}, which "
                    f"{type(model).__name__} does not have; was it trained on another model?"
                )
            change = scale * (up.float() @ low.float()).to(weight.device)
            change = change.t() if settings.get("fan_in_fan_out") else change
            if change.shape != weight.shape:
                raise ModelError(
                    f"the adapter {folder} has shape {tuple(change.shape)} for {name.removeprefix(_PREFIX)!r}, the "
                    f"model {tuple(weight.shape)}; was it trained on another model?"
                )
            weight.copy_((weight.float() + change).to(weight.dtype))
    return len(names)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(folder / "adapter_config.json")
        rank, _ = int(found["r"]), float(found["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'adapter_config.json'} cannot be understood: {error!r}") from error
    special = [name for name in _CANNOT if found.get(name)]
    if rank < 1 or special:
        raise ModelError(
            f"the adapter {folder} uses {special[0] if special else f'r={rank}'}, which cannot be merged here; merge "
            "it with peft (merge_and_unload) and set model.path to the result"
        )
    return found


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"no adapter can be read from {folder / 'adapter_model.safetensors'}: {error}"
        ) from error
