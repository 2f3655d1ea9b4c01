"""Attention contexts of the "verl" implementation over a device's cache: prompts, and decoding generic models.

What always holds: keys and values are written before they are read, so prompts of one step may share blocks;
no call waits for the device.

Shapes: N tokens of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from verl.models.attention import PackedAttention
from verl.rollout.native.attention import dot_product_attention
from verl.rollout.native.device_cache import DeviceCache
from verl.rollout.native.fused import DecodeInputs
from verl.rollout.native.ops import Ops, decode_slots


@dataclass
class PromptAttention:
    """Chunks of prompts laid end to end: chunk i has `counts[i]` new tokens at the end of `lengths[i]` cached ones.

    `context_slots` are the cache places of all those cached tokens, chunk after chunk; None when every chunk
    starts its sequence, so that the new keys are all there is to read."""

    ops: Ops
    cache: DeviceCache
    slots: torch.Tensor
    counts: list[int]
    lengths: list[int]
    context_slots: torch.Tensor | None
    fresh: PackedAttention

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        keys, values = self.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        self.ops.write_cache(k[0].transpose(0, 1), v[0].transpose(0, 1), keys, values, self.slots)
        if self.context_slots is None:
            return self.fresh.attend(
                module, q, k, v, scaling=scaling, sliding_window=sliding_window, softcap=softcap
            )
        block, place = self.context_slots // self.cache.block_size, self.context_slots % self.cache.block_size
        k_all = keys[block, :, place].split(self.lengths)
        v_all = values[block, :, place].split(self.lengths)
        groups = q.shape[1] // k.shape[1]
        out = []
        for q_i, k_i, v_i in zip(q[0].split(self.counts, dim=1), k_all, v_all, strict=True):
            count, length = q_i.shape[1], k_i.shape[0]
            first = length - count
            behind = torch.arange(first, length, device=q.device)[:, None] - torch.arange(
                length, device=q.device
            )
            seen = behind >= 0 if sliding_window is None else (behind >= 0) & (behind < sliding_window)
            mask = torch.zeros(count, length, dtype=q.dtype, device=q.device).masked_fill_(
                ~seen, float("-inf")
            )
            k_h, v_h = (x.transpose(0, 1).repeat_interleave(groups, 0)[None] for x in (k_i, v_i))
            out.append(dot_product_attention(q_i[None], k_h, v_h, mask, scaling, softcap)[0].transpose(0, 1))
        return torch.cat(out)[None]


@dataclass
class DecodeAttention:
    """One token for each row, for models that run through their own module."""

    ops: Ops
    cache: DeviceCache
    inputs: DecodeInputs

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        keys, values = self.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        state = self.inputs
        slots = decode_slots(
            state.table, state.positions, state.active, self.cache.block_size, self.cache.blocks + 1
        )
        self.ops.write_cache(k[0].transpose(0, 1), v[0].transpose(0, 1), keys, values, slots)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return self.ops.decode_attention(
            q[0].transpose(0, 1).contiguous(),
            keys,
            values,
            state.table,
            state.positions,
            state.active,
            scale,
            sliding_window,
            softcap,
        )[None]
