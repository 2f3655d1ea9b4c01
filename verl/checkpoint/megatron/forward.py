"""The model's answer computed from Megatron's own matrices, as Megatron computes it.

It shares nothing with the way weights are renamed and cut up for Hugging Face, so that the two can be held against
each other: a permuted head or a swapped gate would show.

What always holds: float32 arithmetic on weights rounded to the type asked for; memory holds one layer at a time.

Shapes: N tokens, H hidden, G groups of heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from verl.checkpoint.megatron.source import MegatronSource


@torch.no_grad()
def megatron_logits(
    source: MegatronSource, config: Any, rotary: Any, prompt: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Logits [N, vocabulary] of a prompt [N]. `rotary` is the Hugging Face module that turns positions into cosines
    and sines: how fast they turn is known from config.json alone."""

    def top(name: str) -> torch.Tensor:
        return source.own(name).to(dtype).float()

    embedding = top("embedding.word_embeddings.weight")
    x_NH = embedding[prompt]
    cos, sin = (part[0].float() for part in rotary(x_NH[None], torch.arange(len(prompt))[None]))
    for layer in range(source.layers):
        x_NH = _layer(source, layer, config, dtype, x_NH, cos, sin)
    x_NH = rms_norm(x_NH, x_NH.shape[-1:], top("decoder.final_layernorm.weight"), config.rms_norm_eps)
    output = top("output_layer.weight") if source.has("output_layer.weight") else embedding
    return linear(x_NH, output)[:, : config.vocab_size]


def _layer(
    source: MegatronSource,
    layer: int,
    config: Any,
    dtype: torch.dtype,
    x_NH: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    def read(*names: str) -> torch.Tensor | None:
        for name in names:
            if source.has(name, layer):
                return source.own(name, layer).to(dtype).float()
        return None

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weight, config.rms_norm_eps)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = read(f"{name}.weight")
        if weight is None:  # saved in two parts
            weight = torch.cat(
                [source.own(f"{name}.weight_{part}", layer).to(dtype).float() for part in "wv"]
            )
        return linear(x, weight, read(f"{name}.bias"))

    groups, queries, head = source.layout.groups, source.layout.queries, source.layout.head
    before = norm(x_NH, read("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"))
    mixed = project(before, "self_attention.linear_qkv").view(len(x_NH), groups, queries + 2, head)
    q, k, v = mixed.split([queries, 1, 1], dim=2)
    q, k, v = (part.reshape(len(x_NH), -1, head).transpose(0, 1) for part in (q, k, v))
    q_weight, k_weight = read("self_attention.q_layernorm.weight"), read("self_attention.k_layernorm.weight")
    if q_weight is not None and k_weight is not None:
        q, k = norm(q, q_weight), norm(k, k_weight)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    k, v = k.repeat_interleave(queries, 0), v.repeat_interleave(queries, 0)
    attended = scaled_dot_product_attention(q, k, v, is_causal=True)
    x_NH = x_NH + project(attended.transpose(0, 1).reshape(len(x_NH), -1), "self_attention.linear_proj")

    before = norm(x_NH, read("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"))
    if source.has("mlp.router.weight", layer):
        return x_NH + _experts(before, read, config)
    gate, up = project(before, "mlp.linear_fc1").chunk(2, dim=-1)
    return x_NH + project(silu(gate) * up, "mlp.linear_fc2")


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _experts(x_NH: torch.Tensor, read: Callable[[str], torch.Tensor | None], config: Any) -> torch.Tensor:
    router, into, out = (
        read(f"mlp.{name}.weight")
        for name in ("router", "experts.experts.linear_fc1", "experts.experts.linear_fc2")
    )
    assert router is not None and into is not None and out is not None
    share, chosen = linear(x_NH, router).softmax(-1).topk(config.num_experts_per_tok, dim=-1)
    if config.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    result = torch.zeros_like(x_NH)
    for token, (shares, experts) in enumerate(zip(share, chosen, strict=True)):
        for weight, expert in zip(shares, experts, strict=True):
            gate, up = linear(x_NH[token], into[expert]).chunk(2, dim=-1)
            result[token] += weight * linear(silu(gate) * up, out[expert])
    return result
