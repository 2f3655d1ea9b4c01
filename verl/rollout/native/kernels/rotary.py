# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding of queries and keys, optional per-head norm before it, and the write to the KV cache, in one go.

One program per row. The cache of a layer is [blocks, kv_heads, block_size, head_dim]; a row that is not active
writes to the last block, which belongs to no sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from verl.rollout.native.ops import DecodeInputs


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """As the cache stores it: eight-bit floats end at 448."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def _head_norm(
    first, second, weight_ptr, eps, dtype: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr
):
    """RMSNorm of heads given as their two halves [heads, HALF_UP], 0 from column HALF on."""
    columns = tl.arange(0, HALF_UP)
    inside = columns < HALF
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    scale = (1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps))[
        :, None
    ]
    weight_first = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_second = tl.load(weight_ptr + HALF + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = (weight_first * (first * scale).to(dtype).to(tl.float32)).to(dtype)
    second = (weight_second * (second * scale).to(dtype).to(tl.float32)).to(dtype)
    return first, second


@triton.jit
def _rotate(first, second, cos, sin, dtype: tl.constexpr):
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    turned_first = (first * cos).to(dtype).to(tl.float32) + (-second * sin).to(dtype).to(tl.float32)
    turned_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit
def _rotary_cache(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    positions_ptr,
    active_ptr,
    table_ptr,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    trash,
    eps,
    HEADS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    KV: tl.constexpr,
    KV_UP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_UP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    DIM: tl.constexpr = 2 * HALF
    active = tl.load(active_ptr + row) != 0
    position = tl.where(active, tl.load(positions_ptr + row), 0)
    columns = tl.arange(0, HALF_UP)
    inside = columns < HALF
    cos = tl.load(cos_ptr + position * DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * DIM + columns, mask=inside, other=0.0).to(tl.float32)[None, :]

    heads = tl.arange(0, HEADS_UP)
    mask = (heads < HEADS)[:, None] & inside[None, :]
    offsets = heads[:, None] * DIM + columns[None, :]
    base = q_ptr + row * q_stride
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if NORM:
        first, second = _head_norm(first, second, q_norm_ptr, eps, dtype, HALF, HALF_UP)
    first, second = _rotate(first, second, cos, sin, dtype)
    out = q_out_ptr + row * HEADS * DIM
    tl.store(out + offsets, first, mask=mask)
    tl.store(out + offsets + HALF, second, mask=mask)

    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE)
    block = tl.where(active, block, trash).to(tl.int64)
    kv_heads = tl.arange(0, KV_UP)
    mask = (kv_heads < KV)[:, None] & inside[None, :]
    offsets = kv_heads[:, None] * DIM + columns[None, :]
    targets = (
        (block * KV + kv_heads[:, None]) * BLOCK_SIZE * DIM + (position % BLOCK_SIZE) * DIM + columns[None, :]
    )
    base = k_ptr + row * k_stride
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    if NORM:
        first, second = _head_norm(first, second, k_norm_ptr, eps, dtype, HALF, HALF_UP)
    first, second = _rotate(first, second, cos, sin, dtype)
    stored: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + targets, _stored(first, stored), mask=mask)
    tl.store(keys_ptr + targets + HALF, _stored(second, stored), mask=mask)
    base = v_ptr + row * v_stride
    first = tl.load(base + offsets, mask=mask, other=0.0)
    second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    tl.store(values_ptr + targets, _stored(first, stored), mask=mask)
    tl.store(values_ptr + targets + HALF, _stored(second, stored), mask=mask)


def rotary_cache(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    inputs: DecodeInputs,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Of three tensors [M, heads * dim] the first, rotated: [M, heads, dim]; cos and sin [positions, dim]."""
    (keys, values), (cos, sin), (_, positions, active, table) = cache, rope, inputs[:4]
    blocks, kv_heads, block_size, dim = keys.shape
    rows, heads = qkv[0].shape[0], qkv[0].shape[1] // dim
    q_out = torch.empty(rows, heads, dim, dtype=qkv[0].dtype, device=qkv[0].device)
    q_norm, k_norm, eps = norms if norms is not None else (cos, cos, 0.0)
    pointers = (*qkv, q_out, keys, values, cos, sin, q_norm, k_norm, positions, active, table)
    _rotary_cache[(rows,)](
        *pointers,
        *(part.stride(0) for part in qkv),
        table.stride(0),
        blocks - 1,
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
    return q_out


@triton.jit
def _write_rows(
    source_ptr, cache_ptr, token, slot, token_stride, head_stride,
    KV: tl.constexpr, KV_UP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    heads = tl.arange(0, KV_UP)[:, None]
    columns = tl.arange(0, DIM_UP)[None, :]
    mask = (heads < KV) & (columns < DIM)
    row = tl.load(source_ptr + token * token_stride + heads * head_stride + columns, mask=mask, other=0.0)
    target = ((slot // BLOCK_SIZE) * KV + heads) * BLOCK_SIZE * DIM + (slot % BLOCK_SIZE) * DIM + columns
    tl.store(cache_ptr + target, _stored(row, cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_cache(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    KV: tl.constexpr, KV_UP: tl.constexpr, K_DIM: tl.constexpr, K_DIM_UP: tl.constexpr, V_DIM: tl.constexpr,
    V_DIM_UP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    _write_rows(
        k_ptr, keys_ptr, token, slot, k_token_stride, k_head_stride, KV, KV_UP, K_DIM, K_DIM_UP, BLOCK_SIZE
    )
    _write_rows(
        v_ptr, values_ptr, token, slot, v_token_stride, v_head_stride, KV, KV_UP, V_DIM, V_DIM_UP, BLOCK_SIZE
    )


def write_cache(
    k: torch.Tensor, v: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """k and v [N, kv_heads, size] (any strides, unit last) go to `slots` [N] of the cache."""
    keys, values = cache
    _, kv_heads, block_size, key_size = keys.shape
    value_size = values.shape[3]
    if k.shape[1:] != (kv_heads, key_size) or v.shape[1:] != (kv_heads, value_size):
        raise ValueError(
            f"keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit a cache of {tuple(keys.shape)} and "
            f"{tuple(values.shape)}"
        )
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    _write_cache[(k.shape[0],)](
        *(k, v, keys, values, slots),
        *strides,
        KV=kv_heads,
        KV_UP=triton.next_power_of_2(kv_heads),
        K_DIM=key_size,
        K_DIM_UP=triton.next_power_of_2(key_size),
        V_DIM=value_size,
        V_DIM_UP=triton.next_power_of_2(value_size),
        BLOCK_SIZE=block_size,
        num_warps=2,
    )
