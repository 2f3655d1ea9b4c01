"""The operations of a decode step, twice: plain torch (the reference, any device) and Triton (CUDA).

Both round where the Hugging Face modules round. A row that is not active reads no context, writes only to the last
block of the cache (which belongs to no sequence) and keeps its state.

Shapes: M rows, the cache of a layer is [blocks, kv_heads, block_size, head_dim], `table` is [M, blocks of a row].
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import nn

from verl.rollout.sampling import invert_cdf, uniform

FP8_TYPE = torch.float8_e4m3fn
FP8_MAX = 448.0

Norms = tuple[torch.Tensor, torch.Tensor, float] | None
"""Weights of the per-head norms of queries and keys, and their epsilon."""


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return weight * value.to(x.dtype)


def decode_slots(
    table: torch.Tensor, positions: torch.Tensor, active: torch.Tensor, block_size: int, blocks: int
) -> torch.Tensor:
    """The slot of the cache each row writes to; rows that are not active write to the last block."""
    positions = torch.where(active.bool(), positions, 0)
    block = table.gather(1, (positions // block_size)[:, None]).long()[:, 0]
    return torch.where(active.bool(), block, blocks - 1) * block_size + positions % block_size


class TorchOps:
    """The reference; the signatures are those of `TritonOps`, too."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return _rms_norm(total, weight, eps), total

    def joined_linear(self, x: torch.Tensor, layers: Seq[nn.Linear]) -> torch.Tensor:
        """The outputs of several layers side by side: [M, N0 + N1 + N2]."""
        return torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], dim=1)

    def gated_linear(self, x: torch.Tensor, gate: nn.Linear, up: nn.Linear) -> torch.Tensor:
        return F.silu(F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def quantise_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[M, K] -> e4m3 [M, K] and a scale for each row, [M, 1]."""
        scales = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8_TYPE), scales

    def scaled_product(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """e4m3 [M, K] and [N, K] with scales [M, 1] and [1, N] -> [M, N]."""
        return ((x.float() @ weight.float().t()) * x_scales * weight_scales).to(dtype)

    def rotary_cache(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        active: torch.Tensor,
        table: torch.Tensor,
        heads: int,
        norms: Norms,
    ) -> torch.Tensor:
        blocks, kv_heads, block_size, dim = keys.shape
        q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = _rms_norm(q, norms[0], norms[2]), _rms_norm(k, norms[1], norms[2])
        position = torch.where(active.bool(), positions, 0)
        cos_M, sin_M = cos[position][:, None], sin[position][:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos_M + torch.cat([-second, first], dim=-1) * sin_M

        slots = decode_slots(table, positions, active, block_size, blocks)
        self.write_cache(turned(k), v, keys, values, slots)
        return turned(q)

    def write_cache(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block_size = keys.shape[2]
        keys[slots // block_size, :, slots % block_size] = k
        values[slots // block_size, :, slots % block_size] = v

    def decode_attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        active: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        _, kv_heads, block_size, dim = keys.shape
        rows, heads, _ = q.shape
        length = torch.where(active.bool(), positions + 1, 0)[:, None]
        position = torch.arange(table.shape[1] * block_size, device=q.device)
        seen = position < length
        if window is not None:
            seen &= position >= length - window
        k = keys[table.long()].transpose(1, 2).flatten(2, 3)
        v = values[table.long()].transpose(1, 2).flatten(2, 3)
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        scores = (grouped.float() @ k.float().transpose(-1, -2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        v = v.float().masked_fill(~seen[:, None, :, None], 0.0)
        return (weights @ v).reshape(rows, heads, -1).to(q.dtype)

    def sample_plain(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        greedy: torch.Tensor,
        keys: torch.Tensor,
        produced: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = logits.float() / temperature[:, None]
        peak = values.amax(-1, keepdim=True)
        weights = (values - peak).exp()
        tokens = invert_cdf(weights, uniform(keys, produced))
        tokens = torch.where(greedy.bool(), values.argmax(-1), tokens)
        log_probs = values.gather(1, tokens[:, None]) - peak - weights.sum(-1, keepdim=True).log()
        return tokens, log_probs[:, 0]

    def advance(
        self,
        sampled: torch.Tensor,
        log_probs: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        produced: torch.Tensor,
        generated: torch.Tensor,
        active: torch.Tensor,
        last: torch.Tensor,
        stop_ids: torch.Tensor,
        slots: torch.Tensor,
        out_tokens: torch.Tensor,
        out_log_probs: torch.Tensor,
    ) -> None:
        on = active.bool()
        rows = on.nonzero()[:, 0]
        out_tokens[slots[rows], generated[rows]] = sampled[rows].to(out_tokens.dtype)
        out_log_probs[slots[rows], generated[rows]] = log_probs[rows]
        tokens.copy_(torch.where(on, sampled, tokens))
        ended = (stop_ids == sampled[:, None]).any(-1) | (positions + 1 >= last)
        for counter in (generated, positions, produced):
            counter.add_(on.to(counter.dtype))
        active.mul_((~(on & ended)).to(active.dtype))


SMALL = 1024
"""Up to this width of the model our own products in one kernel beat several of the library's."""


def _side_by_side(x: torch.Tensor, layers: Seq[nn.Linear]) -> torch.Tensor:
    widths = [layer.out_features for layer in layers]
    out = torch.empty(x.shape[0], sum(widths), dtype=x.dtype, device=x.device)
    for layer, part in zip(layers, out.split(widths, dim=1), strict=True):
        if layer.bias is None:
            torch.mm(x, layer.weight.t(), out=part)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=part)
    return out


class TritonOps:
    """The kernels, for one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        from verl.rollout.native.kernels import attention, fp8, gated, linear, norm, rotary, sampling

        self.add_rms_norm = norm.add_rms_norm
        self.silu_mul = gated.silu_mul
        self.quantise_rows = fp8.quantise_rows
        self._linear = linear
        self.rotary_cache = rotary.rotary_cache
        self.write_cache = rotary.write_cache
        self.sample_plain = sampling.sample_plain
        self.advance = sampling.advance
        self._attention = attention
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def joined_linear(self, x: torch.Tensor, layers: Seq[nn.Linear]) -> torch.Tensor:
        biases = [layer.bias for layer in layers]
        if x.shape[1] <= SMALL and len(layers) == 3 and len({bias is None for bias in biases}) == 1:
            weights = (layers[0].weight, layers[1].weight, layers[2].weight)
            joined = None if biases[0] is None else (biases[0], biases[1], biases[2])
            return self._linear.joined_linear(x, weights, joined)
        return _side_by_side(x, layers)

    def scaled_product(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        # The device's product with a scale per row gives bfloat16 only.
        out = torch._scaled_mm(x, weight.t(), x_scales, weight_scales, out_dtype=torch.bfloat16)
        return out.to(dtype)

    def gated_linear(self, x: torch.Tensor, gate: nn.Linear, up: nn.Linear) -> torch.Tensor:
        if x.shape[1] <= SMALL and gate.bias is None and up.bias is None:
            return self._linear.gated_linear(x, gate.weight, up.weight)
        both = _side_by_side(x, [gate, up])
        return self.silu_mul(*both.chunk(2, dim=1))

    def decode_attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        active: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        splits = self._attention.choose_splits(q.shape[0], keys.shape[1], self.processors)
        return self._attention.decode_attention(
            q, keys, values, table, positions, active, scale, window, softcap, splits
        )


Ops = TorchOps | TritonOps
