# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of a prompt pass's queries and keys in place, optional per-head norm before it, and the write of
keys and values to the KV cache, in one kernel. One program per token; arithmetic and rounding are those of the decode
step's kernel (`rotary`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.rollout.native.kernels.rotary import _head_norm, _rotate, _stored


@triton.jit
def _rotary_prompt(
    qkv_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, positions_ptr, slots_ptr, qkv_stride, eps,
    HEADS: tl.constexpr, HEADS_UP: tl.constexpr, KV: tl.constexpr, KV_UP: tl.constexpr, HALF: tl.constexpr,
    HALF_UP: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    DIM: tl.constexpr = 2 * HALF
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    columns = tl.arange(0, HALF_UP)
    inside = columns < HALF
    cos = tl.load(cos_ptr + position * DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]

    heads = tl.arange(0, HEADS_UP)
    mask = (heads < HEADS)[:, None] & inside[None, :]
    offsets = heads[:, None] * DIM + columns[None, :]
    base = qkv_ptr + token * qkv_stride
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    if NORM:
        first, second = _head_norm(first, second, q_norm_ptr, eps, dtype, HALF, HALF_UP)
    first, second = _rotate(first, second, cos, sin, dtype)
    tl.store(base + offsets, first, mask=mask)
    tl.store(base + offsets + HALF, second, mask=mask)

    kv_heads = tl.arange(0, KV_UP)
    mask = (kv_heads < KV)[:, None] & inside[None, :]
    offsets = kv_heads[:, None] * DIM + columns[None, :]
    place = (slot // BLOCK_SIZE * KV + kv_heads[:, None]) * BLOCK_SIZE + slot % BLOCK_SIZE
    targets = place * DIM + columns[None, :]
    base += HEADS * DIM
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    if NORM:
        first, second = _head_norm(first, second, k_norm_ptr, eps, dtype, HALF, HALF_UP)
    first, second = _rotate(first, second, cos, sin, dtype)
    tl.store(base + offsets, first, mask=mask)
    tl.store(base + offsets + HALF, second, mask=mask)
    stored: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + targets, _stored(first, stored), mask=mask)
    tl.store(keys_ptr + targets + HALF, _stored(second, stored), mask=mask)
    base += KV * DIM
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    tl.store(values_ptr + targets, _stored(first, stored), mask=mask)
    tl.store(values_ptr + targets + HALF, _stored(second, stored), mask=mask)


def rotary_prompt(
    qkv: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """qkv [N, (heads + 2 kv) * dim] with unit stride within a token, changed in place and returned; cos and sin
    [positions, dim]; `places` are the positions and the cache slots of the tokens, both int64."""
    (keys, values), (cos, sin), (positions, slots) = cache, rope, places
    _, kv_heads, block_size, dim = keys.shape
    q_norm, k_norm, eps = norms if norms is not None else (cos, cos, 0.0)
    _rotary_prompt[(qkv.shape[0],)](
        *(qkv, keys, values, cos, sin, q_norm, k_norm, positions, slots),
        qkv.stride(0),
        eps,
        HEADS=heads,
        HEADS_UP=triton.next_power_of_2(heads),
        KV=kv_heads,
        KV_UP=triton.next_power_of_2(kv_heads),
        HALF=dim // 2,
        HALF_UP=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=block_size,
        NORM=norms is not None,
        num_warps=2 if heads * dim <= 1024 else 4,
        # A fused multiply-add would skip the rounding of a product, which the modules do.
        enable_fp_fusion=False,
    )
    return qkv
