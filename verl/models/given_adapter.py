"""LoRA adapters that a user's model came with (peft's `get_peft_model`, transformers' `add_adapter`).

They are trained in place, as those of `model.lora_rank` are. What cannot be trained and saved like them is refused by
name."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from verl.errors import ConfigError

ADAPTER = "default"
UNSUPPORTED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
)
"""Entries of a `LoraConfig` whose adapters are more than one pair of matrices of one rank and scale for each layer."""
_NOT_TRAINED = (*UNSUPPORTED, "target_parameters", "trainable_token_indices", "alora_invocation_tokens")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_INSTEAD = (
    "give get_peft_model(model, LoraConfig(r=..., target_modules=[...])), or the model without adapters"
)


def given_lora(model: Any) -> Any:
    """The `LoraConfig` of the adapters the model has; None without. ConfigError for adapters of another kind."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    kinds = sorted({str(getattr(c.peft_type, "value", c.peft_type)) for c in configs.values()})
    if kinds != ["LORA"]:
        raise ConfigError(
            f"the model has an adapter of peft's kind {', '.join(kinds)}; only LORA is trained: {_INSTEAD}"
        )
    if list(configs) != [ADAPTER]:
        raise ConfigError(
            f"the model has the adapters {', '.join(configs)}; it may have one, named '{ADAPTER}': merge the others "
            "(merge_and_unload)"
        )
    config = configs[ADAPTER]
    special = [name for name in _NOT_TRAINED if getattr(config, name, None)]
    special += ["bias"] if config.bias != "none" else []
    special += ["init_lora_weights"] if str(config.init_lora_weights).startswith(_CHANGES_BASE) else []
    if special:
        value = getattr(config, special[0])
        raise ConfigError(
            f"the model's LoraConfig has {special[0]}={value!r}, which is not trained here; leave it out, or merge the "
            "adapter (merge_and_unload)"
        )
    for name, layer in adapted_layers(model):
        if type(layer).__name__ != "Linear" or not layer.base_layer.weight.is_floating_point():
            raise ConfigError(
                f"the adapter of {name!r} is on a {type(layer.base_layer).__name__}; only those of linear layers whose "
                "weights are not quantized are trained: load the model without quantization, and leave the module out "
                "of target_modules"
            )
        if layer.merged:
            raise ConfigError("the model's adapter is merged into its weights; call unmerge_adapter() first")
    return config


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers of peft that have the adapter, whatever they are around."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and ADAPTER in getattr(module, "scaling", ())
    ]


def adapter_keys(model: Any) -> dict[str, Any]:
    """The keys below `actor_rollout_ref.model` that say what adapters the model came with; empty without."""
    config = given_lora(model)
    if config is None:
        return {}
    names = sorted({name.rpartition(".")[2] for name, _ in adapted_layers(model)})
    alpha = {"lora_alpha": config.lora_alpha} if isinstance(config.lora_alpha, int) else {}
    return {"lora_rank": config.r, "target_modules": names, **alpha}


def without_adapters(model: Any) -> Any:
    """A copy of the model whose weights have the adapters' products added."""
    copied = copy.deepcopy(model)
    for name, layer in adapted_layers(copied):
        layer.merge()
        owner, _, last = name.rpartition(".")
        setattr(copied.get_submodule(owner), last, layer.base_layer)
    if getattr(copied, "peft_config", None):
        del copied.peft_config
    return copied
