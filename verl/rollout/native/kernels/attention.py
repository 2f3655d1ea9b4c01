# mypy: disable-error-code="no-untyped-def"
"""Decode attention over the paged cache: one query token per row, grouped heads, long contexts split.

One program serves the query heads of one key/value head of one row, over one split of its context; with more
than one split a second kernel joins the parts. Rows that are not active have no context and return zeros.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@triton.jit
def _decode_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions_ptr,
    active_ptr,
    out_ptr,
    part_ptr,
    peak_ptr,
    mass_ptr,
    q_stride,
    table_stride,
    scale,
    softcap,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_UP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    V_DIM: tl.constexpr,
    V_DIM_UP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    active = tl.load(active_ptr + row) != 0
    length = tl.where(active, tl.load(positions_ptr + row) + 1, 0).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE) * TILE
    start = begin + split * share
    end = tl.minimum(start + share, length)

    members = tl.arange(0, GROUP_UP)
    columns = tl.arange(0, DIM_UP)
    v_columns = tl.arange(0, V_DIM_UP)
    q_mask = (members < GROUP)[:, None] & (columns < DIM)[None, :]
    q_offsets = (head * GROUP + members)[:, None] * DIM + columns[None, :]
    q = tl.load(q_ptr + row * q_stride + q_offsets, mask=q_mask, other=0.0)

    peak = tl.full([GROUP_UP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_UP], tl.float32)
    acc = tl.zeros([GROUP_UP, V_DIM_UP], tl.float32)
    for base in range(start, end, TILE):
        positions = base + tl.arange(0, TILE)
        inside = positions < end
        block = tl.load(table_ptr + row * table_stride + positions // BLOCK_SIZE, mask=inside, other=0).to(
            tl.int64
        )
        offsets = (block * KV + head) * BLOCK_SIZE + positions % BLOCK_SIZE
        k_mask = inside[:, None] & (columns < DIM)[None, :]
        k = tl.load(keys_ptr + offsets[:, None] * DIM + columns[None, :], mask=k_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        v_mask = inside[:, None] & (v_columns < V_DIM)[None, :]
        v = tl.load(values_ptr + offsets[:, None] * V_DIM + v_columns[None, :], mask=v_mask, other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        mass = mass * decay + tl.sum(weights, 1)
        peak = new_peak

    out_mask = (members < GROUP)[:, None] & (v_columns < V_DIM)[None, :]
    if SPLITS == 1:
        out = acc / tl.where(mass == 0, 1.0, mass)[:, None]
        slot = row * (KV * GROUP) + head * GROUP + members
        out_offsets = slot[:, None] * V_DIM + v_columns[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        slot = (row * SPLITS + split) * (KV * GROUP) + head * GROUP + members
        tl.store(part_ptr + slot[:, None] * V_DIM + v_columns[None, :], acc, mask=out_mask)
        tl.store(peak_ptr + slot, peak, mask=members < GROUP)
        tl.store(mass_ptr + slot, mass, mask=members < GROUP)


@triton.jit
def _join_splits(
    part_ptr,
    peak_ptr,
    mass_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, DIM_UP)
    slots = (row * SPLITS + splits) * HEADS + head
    peaks = tl.load(peak_ptr + slots)
    masses = tl.load(mass_ptr + slots)
    top = tl.max(peaks, 0)
    weights = tl.where(masses > 0, tl.exp2(peaks - top), 0.0)
    inside = (columns < DIM)[None, :]
    parts = tl.load(part_ptr + slots[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
    total = tl.sum(masses * weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    offsets = (row * HEADS + head) * DIM + columns
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=columns < DIM)


def choose_splits(rows: int, kv_heads: int, processors: int) -> int:
    """Enough programs to fill the device about four times; a power of two."""
    wanted = 4 * processors // max(rows * kv_heads, 1)
    splits = 1
    while splits * 2 <= min(wanted, 16):
        splits *= 2
    return splits


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None = None,
) -> torch.Tensor:
    """q [M, heads, dim] (unit strides within a row) against the blocks of each row; returns [M, heads, value size]."""
    (keys, values), (_, positions, active, table) = cache, inputs
    _, kv_heads, block_size, dim = keys.shape
    value_dim = values.shape[3]
    rows, heads, _ = q.shape
    splits = splits or choose_splits(rows, kv_heads, _processors(q.device))
    group = heads // kv_heads
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    dim_up, value_dim_up = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    if splits > 1:
        part = torch.empty(rows, splits, heads, value_dim, dtype=torch.float32, device=q.device)
        peak = torch.empty(rows, splits, heads, dtype=torch.float32, device=q.device)
        mass = torch.empty_like(peak)
    else:
        part = peak = mass = out
    tile, stages = tile_and_stages((dim_up + value_dim_up) * keys.element_size())
    pointers = (q, keys, values, table, positions, active, out, part, peak, mass)
    numbers = (q.stride(0), table.stride(0), scale, float(softcap or 0.0))
    _decode_attention[(rows, kv_heads, splits)](
        *pointers,
        *numbers,
        KV=kv_heads,
        GROUP=group,
        GROUP_UP=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_UP=dim_up,
        V_DIM=value_dim,
        V_DIM_UP=value_dim_up,
        BLOCK_SIZE=block_size,
        TILE=tile,
        SPLITS=splits,
        WINDOW=int(window or 0),
        SOFTCAP=softcap is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=2 if dim_up <= 64 else 4,
        num_stages=stages,
    )
    if splits > 1:
        sizes = {"HEADS": heads, "DIM": value_dim, "DIM_UP": value_dim_up, "SPLITS": splits}
        _join_splits[(rows, heads)](part, peak, mass, out, **sizes, num_warps=1)
    return out


def tile_and_stages(token_bytes: int) -> tuple[int, int]:
    """Tokens of a tile and how many tiles are loaded ahead: a tile's keys and values, once for each stage, stay below
    the shared memory of a multiprocessor (99 KB on consumer devices) whatever the head size and type."""
    limit = 96 << 10
    tile = 64 if token_bytes <= 512 else 32
    while tile > 16 and tile * token_bytes > limit:
        tile //= 2
    return tile, max(1, min(3, limit // (tile * token_bytes)))
