"""What a Hugging Face module consists of: backbone, output head, decoder layers, weights multiplied per token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.errors import ModelError
from verl.models.value_model import ValueModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def class_of(module: nn.Module) -> type:
    """The module's class, without the one FSDP2 puts in front of it (`FSDPLlamaDecoderLayer`)."""
    bases = type(module).__mro__
    return next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp"))


@dataclass(frozen=True)
class OutputHead:
    """The output matrix of a causal language model and what its architecture does to the logits."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float


def backbone_of(model: Any) -> Any:
    """The model without its output head: its output has `last_hidden_state`."""
    if isinstance(model, ValueModel):
        return model.backbone
    inner = model.base_model
    if inner is model:  # its backbone has another name than `base_model_prefix` (Llama-4's text model)
        inner = getattr(model, "model", None)
    if inner is None or inner is model:
        raise ModelError(f"{type(model).__name__} has no backbone separate from its output head")
    return inner


def output_head(model: Any) -> OutputHead:
    """Read at every call: under sharding the weight is another tensor while the module runs."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or hasattr(layer, "base_layer"):
        raise ModelError(
            f"the output layer of {type(model).__name__} is a {type(layer).__name__}, not a plain linear layer; "
            "with LoRA, leave the output layer out of model.target_modules"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return OutputHead(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None), scale)


def kept_in_float32(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Matches the names of weights that transformers keeps in float32 where the others are of `dtype`; None: it keeps
    none."""
    owner = model.backbone if isinstance(model, ValueModel) else model
    ends = {torch.float16: ("", "_strict"), torch.bfloat16: ("_strict",)}.get(dtype, ())
    parts = [part for end in ends for part in getattr(owner, f"_keep_in_fp32_modules{end}", None) or ()]
    return re.compile("|".join(part.replace("*", ".*") for part in parts)) if parts else None


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks: the classes the model declares unsplittable, else the longest list of modules."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    names = set(getattr(backbone, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if class_of(module).__name__ in names]
    if layers:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def token_weights(module: nn.Module, config: Any) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter and how many of its numbers one token is multiplied with: of a mixture's experts, those it is
    routed to. `config` is the model's text config."""
    experts, used = _first(config, _EXPERTS), _first(config, _USED)
    for name, param in module.named_parameters():
        count = float(param.numel())
        if experts and used:
            # Experts are a list of modules called `experts`, or one parameter whose first dimension they are.
            routed = ".experts." in f".{name}" or (param.ndim == 3 and param.shape[0] == experts)
            count = count * used / experts if routed else count
        yield param, count


def tied_names(model: Any) -> dict[str, str]:
    """Names of the state dict that share their values with another name, and that name."""
    if isinstance(model, ValueModel) or not model.config.tie_word_embeddings:
        return {}
    tied, names = getattr(model, "_tied_weights_keys", None) or {}, model.state_dict().keys()
    return {name: target for name, target in tied.items() if name in names and target in names}
