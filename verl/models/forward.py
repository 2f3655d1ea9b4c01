"""Run a Hugging Face model on a packed (or padded) micro-batch and ask its head only for what is wanted.

What always holds: the vocabulary-wide logits are never made (see `fused_linear`); packed and padded inputs go
through the same lines after the backbone; the whole computation is one call on the module, so that sharding
hooks on the module see it (`attach`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from verl.errors import ModelError
from verl.models.fused_linear import HeadOptions, HeadOutput, fused_head
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


def output_head(model: Any) -> OutputHead:
    """Read at every call: under sharding the weight is another tensor while the module runs."""
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear and not (isinstance(layer, nn.Linear) and hasattr(layer, "unshard")):
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
    """The backbone's last hidden states of the wanted places, [M, D]."""
    backbone = model.backbone if isinstance(model, ValueModel) else model.base_model
    inputs: dict[str, Any] = {
        "input_ids": pack.input_ids,
        "position_ids": pack.position_ids,
        "use_cache": False,
    }
    if pack.attention is not None:
        # A four-dimensional mask is taken for a finished one: without it transformers would look for packed
        # sequences in position_ids, which waits for the device. Our attention never reads it.
        inputs["attention_mask"] = pack.position_ids.new_zeros((1, 1, 1, 1))
        inputs["verl_attn"] = pack.attention
    else:
        inputs["attention_mask"] = pack.attention_mask
    hidden = backbone(**inputs).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, pack.source)


def packed_log_probs(model: Any, pack: Pack, options: HeadOptions) -> HeadOutput:
    """[M] each, float32."""
    head = output_head(model)
    if head.softcap is not None or head.scale != 1.0:
        options = HeadOptions(
            temperature=options.temperature,
            softcap=head.softcap,
            scale=head.scale,
            with_entropy=options.with_entropy,
            with_sum_pi_squared=options.with_sum_pi_squared,
            chunk_rows=options.chunk_rows,
        )
    return fused_head(hidden_states(model, pack), head.weight, pack.target, bias=head.bias, options=options)


def packed_values(model: ValueModel, pack: Pack) -> torch.Tensor:
    """[M], float32: the value before each wanted token."""
    score = model.score
    hidden = hidden_states(model, pack)
    return torch.nn.functional.linear(hidden.float(), score.weight.float(), score.bias.float()).squeeze(-1)


def _forward(model: nn.Module, pack: Pack, options: HeadOptions | None) -> HeadOutput | torch.Tensor:
    if isinstance(model, ValueModel):
        return packed_values(model, pack)
    return packed_log_probs(model, pack, options or HeadOptions())


def attach(model: nn.Module) -> None:
    """Give the module the method `verl_forward(pack, options)`; FSDP2 can then hook it like a forward."""
    setattr(model, FORWARD_METHOD, MethodType(_forward, model))
