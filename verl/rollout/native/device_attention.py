"""Attention contexts of the "verl" implementation over a device's cache: prompts, and decoding generic models.

What always holds: keys and values are written before they are read, so prompts of one step may share blocks;
no call waits for the device.

Shapes: N tokens of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

from verl.models.attention import PackedAttention
from verl.rollout.native.attention import dot_product_attention
from verl.rollout.native.device_cache import DeviceCache
from verl.rollout.native.fused import DecodeInputs
from verl.rollout.native.ops import Ops, decode_slots

Kernel = tuple[Callable[..., torch.Tensor], frozenset[str]]
"""A function and the names of its parameters."""


@lru_cache(maxsize=1)
def _varlen() -> Kernel | None:
    """torch's attention over ragged sequences and its parameters, which have grown between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = frozenset(inspect.signature(varlen_attn).parameters)
    return cast(Callable[..., torch.Tensor], varlen_attn), known


def _bounds(lengths: list[int], device: torch.device) -> torch.Tensor:
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return bounds.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else bounds.to(device)


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

    def __post_init__(self) -> None:
        device = self.slots.device
        self._fresh = PackedAttention.from_lengths(self.counts, device)
        self._bounds = (_bounds(self.counts, device), _bounds(self.lengths, device))

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
        k_NKD, v_NKD = k[0].transpose(0, 1), v[0].transpose(0, 1)
        self.ops.write_cache(k_NKD, v_NKD, keys, values, self.slots)
        ragged = self._ragged(q, softcap)
        if self.context_slots is None:
            if ragged is None:
                return self._fresh.attend(
                    module, q, k, v, scaling=scaling, sliding_window=sliding_window, softcap=softcap
                )
        else:
            size = self.cache.block_size
            block, place = self.context_slots // size, self.context_slots % size
            k_NKD, v_NKD = keys[block, :, place], values[block, :, place]
        if ragged is not None:
            return self._all_at_once(ragged, q, k_NKD, v_NKD, scaling, sliding_window)
        return self._one_by_one(q, k_NKD, v_NKD, scaling, sliding_window, softcap)

    def _ragged(self, q: torch.Tensor, softcap: float | None) -> Kernel | None:
        """The kernel that takes chunks of any lengths at once, where it serves. (The dense kernels of the vendor
        make a plan for each new length, which takes longer than the attention.)"""
        half = q.dtype in (torch.bfloat16, torch.float16)
        return _varlen() if q.is_cuda and half and softcap is None and q.shape[-1] <= 256 else None

    def _all_at_once(
        self,
        ragged: Kernel,
        q: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        kernel, known = ragged
        q_NHD = q[0].transpose(0, 1)
        options: dict[str, Any] = {}
        if window is None and "is_causal" in known:
            options["is_causal"] = True
        else:
            options["window_size"] = (-1 if window is None else window - 1, 0)
        if scaling is not None and "scale" in known:
            options["scale"] = scaling
        elif scaling is not None:
            q_NHD = q_NHD * (scaling * q.shape[-1] ** 0.5)
        if q_NHD.shape[1] != k_NKD.shape[1]:
            if "enable_gqa" in known:
                options["enable_gqa"] = True
            else:
                groups = q_NHD.shape[1] // k_NKD.shape[1]
                k_NKD, v_NKD = (x.repeat_interleave(groups, 1) for x in (k_NKD, v_NKD))
        longest = (max(self.counts), max(self.lengths))
        return kernel(q_NHD, k_NKD, v_NKD, *self._bounds, *longest, **options).unsqueeze(0)

    def _one_by_one(
        self,
        q: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        groups = q.shape[1] // k_NKD.shape[1]
        out = []
        parts = zip(
            q[0].split(self.counts, dim=1), k_NKD.split(self.lengths), v_NKD.split(self.lengths), strict=True
        )
        for q_i, k_i, v_i in parts:
            count, length = q_i.shape[1], k_i.shape[0]
            places = torch.arange(length, device=q.device)
            behind = places[length - count :, None] - places
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            mask = torch.zeros(count, length, dtype=q.dtype, device=q.device)
            mask.masked_fill_(~seen, float("-inf"))
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
