"""The Hugging Face module as the engine calls it: backbone with our attention, then the head on the rows wanted.

Logits are float32 and computed as the trainer computes them (product accumulated in float32, cap and scale of the
architecture applied), so that log-probs agree. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class PositionLimit:
    """Sequences beyond `length` tokens would change the rotary embedding of keys already in the cache.

    "longrope" and "dynamic" exchange all frequencies once a sequence outgrows a limit; a forward over the whole
    sequence, as in training, then gives other keys from the first token on."""

    length: int
    kind: str
    model: str

    def check(self, length: int) -> None:
        if length > self.length:
            raise RolloutError(
                f"a request may reach {length} tokens; beyond {self.length} the rotary embedding of {self.model} "
                f"({self.kind}) changes for cached tokens; keep data.max_prompt_length + data.max_response_length "
                f"within {self.length}, or use rollout.name=vllm"
            )


def position_limit(model: Any) -> PositionLimit | None:
    rotary: Any = getattr(backbone_of(model), "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", None)
    limits = []
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            parameters = rotary.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            limits.append((int(parameters["original_max_position_embeddings"]), kind))
        elif kind and "dynamic" in kind:
            limits.append((int(rotary.original_max_seq_len), kind))
    return PositionLimit(*min(limits), type(model).__name__) if limits else None


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
            # A four-dimensional mask is used as it is; otherwise transformers would look for packed sequences in the
            # positions, which waits for the device. Our attention never reads it.
            attention_mask=position_ids.new_zeros((1, 1, 1, 1)),
            use_cache=False,
            verl_attn=context,
        )
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(hidden, output_head(self.model))
