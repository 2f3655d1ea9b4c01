"""One decode step of the Llama family, written over the module's own weight tensors with fused operations.

Llama, Mistral, Qwen2 and Qwen3 layers differ in three details (biases, a norm per head, a sliding window), which this
follows; everything else, adapters included, goes through the Hugging Face module itself (`Backbone`). The module is
matched by type.

No weight is copied, so an optimiser step is seen at once, by captured graphs, too (fp8 has copies, refreshed whenever
the engine starts to generate or takes new weights).

Shapes: M rows, one token each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verl.models.forward import backbone_of, output_head
from verl.models.introspection import class_of
from verl.rollout.native.backbone import head_logits
from verl.rollout.native.fp8 import Fp8Products
from verl.rollout.native.ops import Norms, Ops

_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that depend on the position alone."""


@dataclass
class PlainProducts:
    """The matrix products of a layer by the module's own linear layers."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def qkv(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values side by side."""
        return ops.joined_linear(x, (self.q, self.k, self.v))

    def o(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.out, x)

    def mlp(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        return _linear(self.down, ops.gated_linear(x, self.gate, self.up))

    def refresh(self) -> None:
        pass


@dataclass
class FusedLayer:
    input_norm: torch.Tensor
    output_norm: torch.Tensor
    products: PlainProducts | Fp8Products
    norms: Norms
    window: int | None
    scale: float


@dataclass
class DecodeInputs:
    """What a decode step reads of the engine's state; all on the device."""

    tokens: torch.Tensor
    positions: torch.Tensor
    active: torch.Tensor
    table: torch.Tensor


class FusedDecoder:
    """Built by `match`; `hidden` runs the layers."""

    def __init__(self, model: Any, layers: list[FusedLayer], heads: int, eps: float) -> None:
        self.model = model
        self.layers = layers
        self.heads = heads
        self.eps = eps
        self.backbone = backbone_of(model)
        self.rotary = self.backbone.rotary_emb
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    @staticmethod
    def match(model: Any, fp8: bool = False) -> FusedDecoder | None:
        """A fused decoder over this model's weights, or None where its layers are not exactly the known ones."""
        backbone = backbone_of(model)
        config = model.config
        if not hasattr(backbone, "layers") or getattr(config, "hidden_act", None) != "silu":
            return None
        rope_type = getattr(getattr(backbone, "rotary_emb", None), "rope_type", None)
        if (
            not isinstance(rope_type, str) or rope_type not in _STATIC_ROPE
        ):  # a dictionary: one per kind of layer
            return None
        layers = [_match_layer(layer, fp8) for layer in backbone.layers]
        if any(layer is None for layer in layers):
            return None
        heads = int(config.num_attention_heads)
        return FusedDecoder(model, [x for x in layers if x is not None], heads, float(config.rms_norm_eps))

    def prepare(self, max_length: int) -> None:
        """Tables of the rotary embedding for positions below `max_length`, from the module's own code."""
        weight = self.model.get_input_embeddings().weight
        position_ids = torch.arange(max_length, device=weight.device)[None]
        cos, sin = self.rotary(weight[:1, None], position_ids)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()

    def refresh(self) -> None:
        """The weights may be new."""
        for layer in self.layers:
            layer.products.refresh()

    def hidden(
        self, ops: Ops, inputs: DecodeInputs, caches: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """[M, D] hidden states of the rows' tokens; their keys and values are written to the caches."""
        if self.cos is None or self.sin is None:
            raise RuntimeError("prepare() was not called")
        x = F.embedding(inputs.tokens, self.model.get_input_embeddings().weight)
        residual: torch.Tensor | None = None
        where = (inputs.positions, inputs.active, inputs.table)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            normed, residual = ops.add_rms_norm(x, residual, layer.input_norm, self.eps)
            qkv = layer.products.qkv(ops, normed)
            q = ops.rotary_cache(
                qkv, keys, values, self.cos, self.sin, *where[:2], where[2], self.heads, layer.norms
            )
            mixed = ops.decode_attention(
                q, keys, values, where[2], *where[:2], layer.scale, layer.window, None
            )
            x = layer.products.o(ops, mixed.flatten(1))
            normed, residual = ops.add_rms_norm(x, residual, layer.output_norm, self.eps)
            x = layer.products.mlp(ops, normed)
        return ops.add_rms_norm(x, residual, self.backbone.norm.weight, self.eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(hidden, output_head(self.model))


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _match_layer(layer: Any, fp8: bool) -> FusedLayer | None:
    kind = class_of(layer)
    if kind.__name__ not in _LAYERS or not kind.__module__.startswith("transformers.models."):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    names = [(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    linears = [getattr(owner, name, None) for owner, name in names]
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    norms: Norms = None
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norms = (q_norm.weight, k_norm.weight, float(q_norm.variance_epsilon))
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        is_mistral = kind.__name__ == "MistralDecoderLayer"
        window = getattr(attention.config, "sliding_window", None) if is_mistral else None
    known = [linear for linear in linears if linear is not None]
    return FusedLayer(
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        Fp8Products(*known) if fp8 else PlainProducts(*known),
        norms=norms,
        window=window,
        scale=float(attention.scaling),
    )
