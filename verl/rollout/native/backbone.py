"""The Hugging Face module as the engine calls it: backbone with our attention, then the head on the rows wanted.

What always holds: logits are float32 and made as the trainer makes them (product accumulated in float32, cap and
scale of the architecture applied), so that log-probs agree; nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.errors import RolloutError
from verl.models.forward import OutputHead, backbone_of, output_head


def head_logits(hidden: torch.Tensor, head: OutputHead) -> torch.Tensor:
    """[M, D] -> [M, V] in float32."""
    if hidden.dtype == torch.float32:
        logits = hidden @ head.weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
    else:
        logits = (hidden @ head.weight.t()).float()
    if head.bias is not None:
        logits += head.bias
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits * head.scale if head.scale != 1.0 else logits


def check_positions(model: Any, longest: int) -> None:
    """RolloutError where sequences of `longest` tokens would change the rotary embedding of keys already in the cache.

    "longrope" and "dynamic" exchange all frequencies once a sequence outgrows a limit; a forward over the whole
    sequence, as in training, then gives other keys from the first token on."""
    rotary: Any = getattr(backbone_of(model), "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            parameters = rotary.config.rope_parameters
            limit = (parameters if layer_type is None else parameters[layer_type])[
                "original_max_position_embeddings"
            ]
        elif kind and "dynamic" in kind:
            limit = rotary.original_max_seq_len
        else:
            continue
        if longest > limit:
            raise RolloutError(
                f"a sequence may reach {longest} tokens, and beyond {limit} the rotary embedding of "
                f"{type(model).__name__} ({kind}) changes for the tokens before; keep data.max_prompt_length + "
                f"data.max_response_length within {limit}, or use rollout.name=vllm"
            )


class Backbone:
    """Calls the model's layers with an attention context of ours."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.backbone = backbone_of(model)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Any) -> torch.Tensor:
        """Ids and positions [N] of the tokens of a step -> hidden states [N, D]."""
        out = self.backbone(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            # A four-dimensional mask is taken for a finished one; otherwise transformers would look for packed
            # sequences in the positions, which waits for the device. Our attention never reads it.
            attention_mask=position_ids.new_zeros((1, 1, 1, 1)),
            use_cache=False,
            verl_attn=context,
        )
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(hidden, output_head(self.model))
