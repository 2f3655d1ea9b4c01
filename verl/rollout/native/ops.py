"""The operations of a decode step, twice: plain torch (the reference, any device) and Triton (CUDA).

Both round where the Hugging Face modules round. A row that is not active reads no context, writes only to the last
block of the cache (which belongs to no sequence) and keeps its state.

Shapes: M rows, the cache of a layer is [blocks, kv_heads, block_size, head_dim], `table` is [M, blocks of a row].
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.attention import AttentionCall
from verl.models.torch_attention import attention_weights, written_attention
from verl.rollout.sampling import invert_cdf, uniform

FP8_TYPE = torch.float8_e4m3fn
FP8_MAX = 448.0

Pair = tuple[Tensor, Tensor]
"""Keys and values of a layer's cache, cosine and sine by position, or numbers and their scales."""
Three = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each [M, heads * dim]."""
Norm = tuple[Tensor, float]
"""Weight and epsilon of a norm."""
Norms = tuple[Tensor, Tensor, float] | None
"""Weights of the per-head norms of queries and keys, and their epsilon."""
Linears = tuple[nn.Linear, nn.Linear, nn.Linear]
"""The layers of queries, keys and values."""


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    value = x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return weight * value.to(x.dtype)


class DecodeInputs(NamedTuple):
    """What a decode step reads of the engine's state; all on the device."""

    tokens: Tensor
    positions: Tensor
    active: Tensor
    table: Tensor
    shared: Tensor | None = None
    """[M] int32: leading tokens of a row whose blocks others may read, too; a property of its request."""
    sharing: Tensor | None = None
    """[1 + M, 2] int32: the number of runs of rows whose tables begin with the same such blocks, then the first row of
    each run and how many rows it has."""
    most_sharing: int = 1
    """Rows of a run, at most."""


def decode_slots(rows: DecodeInputs, block_size: int, blocks: int) -> Tensor:
    """The slot of the cache each row writes to; rows that are not active write to the last block."""
    active = rows.active.bool()
    positions = torch.where(active, rows.positions, 0)
    block = rows.table.gather(1, (positions // block_size)[:, None]).long()[:, 0]
    return torch.where(active, block, blocks - 1) * block_size + positions % block_size


def dot_product_attention(call: AttentionCall, mask: Tensor | None) -> Tensor:
    """SDPA, or its plain form where scores are capped or have sinks."""
    if call.plain:
        return F.scaled_dot_product_attention(*call[:3], attn_mask=mask, scale=call.scaling)
    return written_attention(call, mask)


class TorchOps:
    """The reference; the signatures are those of `TritonOps`, too."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return _rms_norm(total, weight, eps), total

    def qkv_rotary(
        self, x: Tensor, layers: Linears, cache: Pair, rope: Pair, rows: DecodeInputs, norms: Norms
    ) -> Tensor:
        """The three layers' outputs, then `rotary_cache`."""
        q, k, v = (F.linear(x, layer.weight, layer.bias) for layer in layers)
        return self.rotary_cache((q, k, v), cache, rope, rows, norms)

    def gated_linear(self, x: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
        """silu(gate) * up."""
        return self.silu_mul(F.linear(x, gate.weight), F.linear(x, up.weight))

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[M, K] -> e4m3 [M, K] and a scale for each row, [M, 1]."""
        scales = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8_TYPE), scales

    def quantised_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Pair, Tensor]:
        normed, total = self.add_rms_norm(x, residual, weight, eps)
        return self.quantise_rows(normed), total

    def quantised_silu_mul(self, gate: Tensor, up: Tensor) -> Pair:
        return self.quantise_rows(self.silu_mul(gate, up))

    def scaled_product(self, x: Pair, weight: Pair, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """e4m3 [M, K] and [N, K] with scales [M, 1] and [1, N], and a bias [N] -> [M, N]."""
        out = (x[0].float() @ weight[0].float().t()) * x[1] * weight[1]
        return (out if bias is None else out + bias).to(dtype)

    def rotary_cache(self, qkv: Three, cache: Pair, rope: Pair, rows: DecodeInputs, norms: Norms) -> Tensor:
        """Norm and rotate queries and keys (each [M, heads * dim]); write keys and values to the cache; the queries
        [M, heads, dim]."""
        blocks, _, block_size, dim = cache[0].shape
        q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv)
        if norms is not None:
            q, k = _rms_norm(q, norms[0], norms[2]), _rms_norm(k, norms[1], norms[2])
        position = torch.where(rows.active.bool(), rows.positions, 0)
        cos_M, sin_M = (angles[position][:, None] for angles in rope)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos_M + torch.cat([-second, first], dim=-1) * sin_M

        self.write_cache(turned(k), v, cache, decode_slots(rows, block_size, blocks))
        return turned(q)

    def rotary_prompt(
        self, qkv: Tensor, cache: Pair, rope: Pair, places: Pair, heads: int, norms: Norms
    ) -> Tensor:
        """The same for the tokens of prompts at `places` (positions, cache slots): all of qkv, changed in place."""
        _, kv_heads, _, dim = cache[0].shape
        q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        cos_N, sin_N = (angles[places[0]][:, None] for angles in rope)
        for x, weight in ((q, norms and norms[0]), (k, norms and norms[1])):
            normed = x if norms is None or weight is None else _rms_norm(x, weight, norms[2])
            first, second = normed.chunk(2, dim=-1)
            x.copy_(normed * cos_N + torch.cat([-second, first], dim=-1) * sin_N)
        self.write_cache(k, v, cache, places[1])
        return qkv

    def write_cache(self, k: Tensor, v: Tensor, cache: Pair, slots: Tensor) -> None:
        block_size = cache[0].shape[2]
        for new, stored in zip((k, v), cache, strict=True):
            if stored.dtype == FP8_TYPE:
                new = new.clamp(-FP8_MAX, FP8_MAX).to(FP8_TYPE)
            stored[slots // block_size, :, slots % block_size] = new

    def decode_attention(
        self,
        q: Tensor,
        cache: Pair,
        rows: DecodeInputs,
        scale: float,
        window: int | None,
        softcap: float | None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """`sink` [heads]: one more score of each query."""
        _, kv_heads, block_size, dim = cache[0].shape
        count, heads, _ = q.shape
        length = torch.where(rows.active.bool(), rows.positions + 1, 0)[:, None]
        position = torch.arange(rows.table.shape[1] * block_size, device=q.device)
        seen = position < length
        if window is not None:
            seen &= position >= length - window
        k, v = (stored[rows.table.long()].transpose(1, 2).flatten(2, 3) for stored in cache)
        grouped = q.reshape(count, kv_heads, heads // kv_heads, dim)
        scores = (grouped.float() @ k.float().transpose(-1, -2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        weights = attention_weights(scores, sink).nan_to_num(0.0)
        v = v.float().masked_fill(~seen[:, None, :, None], 0.0)
        return (weights @ v).reshape(count, heads, -1).to(q.dtype)

    def sample_plain(
        self, logits: Tensor, temperature: Tensor, greedy: Tensor, keys: Tensor, produced: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One token per row and its log-prob, of rows with nothing but a temperature."""
        values = logits.float() / temperature[:, None]
        peak = values.amax(-1, keepdim=True)
        weights = (values - peak).exp()
        tokens = invert_cdf(weights, uniform(keys, produced))
        tokens = torch.where(greedy.bool(), values.argmax(-1), tokens)
        log_probs = values.gather(1, tokens[:, None]) - peak - weights.sum(-1, keepdim=True).log()
        return tokens, log_probs[:, 0]

    def advance(
        self,
        sampled: Tensor,
        log_probs: Tensor,
        columns: Tensor,
        stop_ids: Tensor,
        out_tokens: Tensor,
        out_log_probs: Tensor,
    ) -> None:
        """Record one drawn token per active row in its slot and end the rows that stop with it, in place.

        `columns` are the integer columns of some rows of a `DeviceState`."""
        active, generated, tokens, positions, produced, last, slots = columns[:7]
        on = active.bool()
        rows = on.nonzero()[:, 0]
        out_tokens[slots[rows], generated[rows]] = sampled[rows].to(out_tokens.dtype)
        out_log_probs[slots[rows], generated[rows]] = log_probs[rows]
        tokens.copy_(torch.where(on, sampled, tokens))
        ended = (stop_ids == sampled[:, None]).any(-1) | (positions + 1 >= last)
        for counter in (generated, positions, produced):
            counter.add_(on.to(counter.dtype))
        active.mul_((~(on & ended)).to(active.dtype))


def side_by_side(x: Tensor, layers: Seq[nn.Linear]) -> Tensor:
    """The outputs of several layers, by the library's product for each."""
    widths = [layer.out_features for layer in layers]
    out = torch.empty(x.shape[0], sum(widths), dtype=x.dtype, device=x.device)
    for layer, part in zip(layers, out.split(widths, dim=1), strict=True):
        if layer.bias is None:
            torch.mm(x, layer.weight.t(), out=part)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=part)
    return out


class TritonOps:
    """The kernels."""

    def __init__(self) -> None:
        from verl.rollout.native.kernels import attention, layers, linear, prompt, rotary, sampling

        self.add_rms_norm = layers.add_rms_norm
        self.silu_mul = layers.silu_mul
        self.quantise_rows = layers.quantise_rows
        self.quantised_norm = layers.quantised_norm
        self.quantised_silu_mul = layers.quantised_silu_mul
        self.qkv_rotary = linear.qkv_rotary
        self.gated_linear = linear.gated_linear
        self.rotary_cache = rotary.rotary_cache
        self.rotary_prompt = prompt.rotary_prompt
        self.write_cache = rotary.write_cache
        self.decode_attention = attention.decode_attention
        self.sample_plain = sampling.sample_plain
        self.advance = sampling.advance

    def scaled_product(self, x: Pair, weight: Pair, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        # The device's product with a scale per row gives bfloat16 only, and adds a bias of that type. Sums stay in the
        # tensor cores: an error of 0.2 % where eight bits have one of 4 %, 1.15 times as fast (7B, 1,024 rows, H200).
        fused = bias if dtype == torch.bfloat16 else None
        scales = (x[1], weight[1])
        out = torch._scaled_mm(
            x[0], weight[0].t(), *scales, bias=fused, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        out = out.to(dtype)
        return out if bias is None or fused is not None else out + bias


Ops = TorchOps | TritonOps
