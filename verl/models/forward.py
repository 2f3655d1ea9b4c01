"""The forward pass of a Hugging Face model on a packed (or padded) micro-batch, without vocabulary-wide logits.

It is one method of the module (`attach`), so that FSDP2 can hook it like `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from verl.errors import ModelError
from verl.models.fused_linear import HeadOptions, fused_head
from verl.models.packing import Pack
from verl.models.value_model import ValueModel

FORWARD_METHOD = "verl_forward"


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
    if (
        inner is model
    ):  # the class names its backbone otherwise than `base_model_prefix` says (Llama-4's text model)
        inner = getattr(model, "model", None)
    if inner is None or inner is model:
        raise ModelError(f"{type(model).__name__} has no backbone apart from its output head")
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


def hidden_states(model: Any, pack: Pack) -> torch.Tensor:
    """The backbone's last hidden states that predict the targets, [M, D]."""
    inputs: dict[str, Any] = {
        "input_ids": pack.input_ids,
        "position_ids": pack.position_ids,
        "use_cache": False,
    }
    if pack.attention is not None:
        # transformers uses a four-dimensional mask as it is; without one it would look for packed sequences in
        # position_ids, which waits for the device. Our attention never reads it.
        inputs["attention_mask"] = pack.position_ids.new_zeros((1, 1, 1, 1))
        inputs["verl_attn"] = pack.attention
    else:
        inputs["attention_mask"] = pack.attention_mask
    hidden = backbone_of(model)(**inputs).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, pack.source)


def packed_log_probs(model: Any, pack: Pack, options: HeadOptions) -> dict[str, torch.Tensor]:
    """`log_probs` and, where asked, `entropy` and `sum_pi_squared`; [M] each, float32."""
    head = output_head(model)
    options = replace(options, softcap=head.softcap, scale=head.scale)
    out = fused_head(hidden_states(model, pack), head.weight, pack.target, bias=head.bias, options=options)
    named = {"log_probs": out.log_probs, "entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
    return {name: value for name, value in named.items() if value is not None}


def packed_values(model: ValueModel, pack: Pack) -> dict[str, torch.Tensor]:
    """`values` [M], float32: the value before each wanted token."""
    score = model.score
    hidden = hidden_states(model, pack)
    values = torch.nn.functional.linear(hidden.float(), score.weight.float(), score.bias.float())
    return {"values": values.sum(dim=-1)}  # not a view: the sharding hooks must survive operations in place


Check = Callable[[Any], dict[str, torch.Tensor]]


def _forward(
    model: nn.Module, pack: Pack | None, options: HeadOptions | None, check: Check | None = None
) -> dict[str, torch.Tensor]:
    if check is not None:
        return check(model)
    assert pack is not None
    if isinstance(model, ValueModel):
        return packed_values(model, pack)
    return packed_log_probs(model, pack, options or HeadOptions())


def attach(model: nn.Module) -> None:
    """Give the module the method `verl_forward(pack, options)`. With `check` it returns `check(module)` instead, with
    the root's parameters gathered. It returns a dict of tensors, because FSDP2's hooks look for tensors in outputs."""
    setattr(model, FORWARD_METHOD, MethodType(_forward, model))
