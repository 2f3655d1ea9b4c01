# mypy: disable-error-code="no-untyped-def"
"""Decode attention over the paged cache: one query token per row, grouped heads, long contexts split.

One program serves the query heads of one key/value head of one row, over one split of its context; with more
than one split a second kernel joins the parts. Rows that are not active have no context and return zeros.

Rows of one prompt can share the work on it: where `DecodeInputs.shared` says how many leading tokens of each row lie in
blocks that it shares, a first kernel computes, for several neighbouring rows at once, the attention to
these tokens (their keys are read once for all of them), and the kernel above starts from its result instead of from
nothing. What a row computes depends only on its own length and `shared`: which rows share a program changes no bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from verl.rollout.native.kernels.launch import early_launch, wait_for_inputs

if TYPE_CHECKING:
    from verl.rollout.native.ops import DecodeInputs

_SHARED_SPLITS = 2
"""Parts of the shared tokens that are computed side by side."""


@triton.jit
def _attend(
    q, peak, mass, acc, row_table_ptr, keys_ptr, values_ptr, head, start, end, scale, softcap,
    KV: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, V_DIM: tl.constexpr, V_DIM_UP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Go on with the queries' running softmax (largest score, mass and weighted sum of values below it) over the keys
    at the positions `start` to `end` of a row."""
    columns = tl.arange(0, DIM_UP)
    v_columns = tl.arange(0, V_DIM_UP)
    positions = start + tl.arange(0, TILE)
    block = tl.load(row_table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)
    for base in range(start, end, TILE):
        # The blocks of the next tile are looked up while this one is computed.
        positions = base + TILE + tl.arange(0, TILE)
        next_block = tl.load(row_table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)
        positions = base + tl.arange(0, TILE)
        inside = positions < end
        place = head * BLOCK_SIZE + positions % BLOCK_SIZE
        k_offsets = block.to(tl.int64) * (KV * BLOCK_SIZE * DIM) + place * DIM
        v_offsets = block.to(tl.int64) * (KV * BLOCK_SIZE * V_DIM) + place * V_DIM
        k_mask = inside[:, None] & (columns < DIM)[None, :]
        v_mask = inside[:, None] & (v_columns < V_DIM)[None, :]
        k = tl.load(keys_ptr + k_offsets[:, None] + columns[None, :], mask=k_mask, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + v_offsets[:, None] + v_columns[None, :], mask=v_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        mass = mass * decay + tl.sum(weights, 1)
        peak = new_peak
        block = next_block
    return peak, mass, acc


@triton.jit(do_not_specialize=["rows"])
def _shared_attention(
    q_ptr, keys_ptr, values_ptr, table_ptr, shared_ptr, sharing_ptr, part_ptr, peak_ptr, mass_ptr,
    q_stride, table_stride, scale, softcap, rows,
    KV: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_UP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Runs of rows against the tokens they share. The number of runs is known on the device only, so that each program
    takes several."""
    wait_for_inputs(EARLY)
    head = tl.program_id(1)
    split = tl.program_id(2)
    queries = tl.arange(0, QUERIES)
    columns = tl.arange(0, DIM_UP)
    v_columns = tl.arange(0, V_DIM_UP)
    slot_head = head * GROUP + queries % GROUP
    for run in range(tl.program_id(0), tl.load(sharing_ptr), tl.num_programs(0)):
        first = tl.load(sharing_ptr + 2 + 2 * run).to(tl.int64)
        count = tl.load(sharing_ptr + 3 + 2 * run)
        length = tl.load(shared_ptr + first)
        share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
        start = split * share
        end = tl.minimum(start + share, length)
        row = first + queries // GROUP
        present = (queries < count * GROUP) & (row < rows)
        q = tl.load(
            q_ptr + (row * q_stride + slot_head * DIM)[:, None] + columns[None, :],
            mask=present[:, None] & (columns < DIM)[None, :],
            other=0.0,
        )
        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, V_DIM_UP], tl.float32)
        peak, mass, acc = _attend(
            q, peak, mass, acc, table_ptr + first * table_stride, keys_ptr, values_ptr, head, start, end, scale,
            softcap, KV, DIM, DIM_UP, V_DIM, V_DIM_UP, BLOCK_SIZE, TILE, SOFTCAP, PRECISION
        )  # fmt: skip
        slot = (row * SPLITS + split) * (KV * GROUP) + slot_head
        part_mask = present[:, None] & (v_columns < V_DIM)[None, :]
        tl.store(part_ptr + slot[:, None] * V_DIM + v_columns[None, :], acc, mask=part_mask)
        tl.store(peak_ptr + slot, peak, mask=present)
        tl.store(mass_ptr + slot, mass, mask=present)


@triton.jit
def _decode_attention(
    q_ptr, keys_ptr, values_ptr, table_ptr, positions_ptr, active_ptr, out_ptr, part_ptr, peak_ptr, mass_ptr,
    shared_ptr, shared_part_ptr, shared_peak_ptr, shared_mass_ptr, sink_ptr,
    q_stride, table_stride, scale, softcap,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_UP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_UP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    active = tl.load(active_ptr + row) != 0
    length = tl.where(active, tl.load(positions_ptr + row) + 1, 0).to(tl.int32)
    begin = 0
    if SHARED_SPLITS > 0:
        begin = tl.minimum(tl.load(shared_ptr + row), length)
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
    out_mask = (members < GROUP)[:, None] & (v_columns < V_DIM)[None, :]

    peak = tl.full([GROUP_UP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_UP], tl.float32)
    acc = tl.zeros([GROUP_UP, V_DIM_UP], tl.float32)
    if SHARED_SPLITS > 0:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if (split == 0) & (begin > 0):
            for part in tl.static_range(SHARED_SPLITS):
                slot = (row * SHARED_SPLITS + part) * (KV * GROUP) + head * GROUP + members
                # Finite for the queries that only fill up the tile, so that no difference is one of infinities.
                part_peak = tl.load(shared_peak_ptr + slot, mask=members < GROUP, other=0.0)
                part_mass = tl.load(shared_mass_ptr + slot, mask=members < GROUP, other=0.0)
                values = tl.load(
                    shared_part_ptr + slot[:, None] * V_DIM + v_columns[None, :], mask=out_mask, other=0.0
                )
                new_peak = tl.maximum(peak, part_peak)
                decay = tl.exp2(peak - new_peak)
                weight = tl.exp2(part_peak - new_peak)
                acc = acc * decay[:, None] + values * weight[:, None]
                mass = mass * decay + part_mass * weight
                peak = new_peak
    peak, mass, acc = _attend(
        q, peak, mass, acc, table_ptr + row * table_stride, keys_ptr, values_ptr, head, start, end, scale, softcap,
        KV, DIM, DIM_UP, V_DIM, V_DIM_UP, BLOCK_SIZE, TILE, SOFTCAP, PRECISION
    )  # fmt: skip

    if SPLITS == 1:
        if SINK:
            sink = tl.load(sink_ptr + head * GROUP + members, mask=members < GROUP, other=0.0).to(tl.float32)
            mass += tl.exp2(sink * 1.4426950408889634 - peak)
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
    sink_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    SPLITS: tl.constexpr,
    SINK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
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
    if SINK:
        total += tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634 - top)
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
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def decode_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    inputs: DecodeInputs,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None = None,
    settings: dict[str, int] | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [M, heads, dim] (unit strides within a row) against the blocks of each row; returns [M, heads, value size].
    `sink` [heads]: one more score of each query, added to the mass when all parts are together.

    `splits` and `settings` (tile and launch settings) are chosen by the shape unless given."""
    keys, values = cache
    _, kv_heads, block_size, dim = keys.shape
    value_dim = values.shape[3]
    rows, heads, _ = q.shape
    splits = splits or choose_splits(rows, kv_heads, _processors(q.device))
    group = heads // kv_heads
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    dim_up, value_dim_up = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))

    def parts_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weighted sums, largest scores and masses of `count` parts of every row."""
        if count == 0:
            return out, out, out
        sums = torch.empty(rows, count, heads, value_dim, dtype=torch.float32, device=q.device)
        peaks = torch.empty(rows, count, heads, dtype=torch.float32, device=q.device)
        return sums, peaks, torch.empty_like(peaks)

    numbers = (q.stride(0), inputs.table.stride(0), scale, float(softcap or 0.0))
    sizes = {
        "KV": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "DIM_UP": dim_up,
        "V_DIM": value_dim,
        "V_DIM_UP": value_dim_up,
        "BLOCK_SIZE": block_size,
        "SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        **early_launch(q.device),
    }
    token_bytes = (dim_up + value_dim_up) * keys.element_size()
    if settings is None:
        tile, stages = tile_and_stages(token_bytes, 32)
        settings = {"TILE": tile, "num_warps": 1 if dim_up <= 128 else 4, "num_stages": stages}
    # A window moves with the row: what lies in it is not shared.
    shared_splits = _SHARED_SPLITS if inputs.shared is not None and window is None else 0
    shared_parts = parts_of(shared_splits)
    shared = out if inputs.shared is None else inputs.shared
    if shared_splits:
        # The queries of a program need memory, too.
        tile, stages = tile_and_stages(2 * token_bytes, 64)
        programs = min(rows, triton.cdiv(3 * _processors(q.device), kv_heads * shared_splits))
        _shared_attention[(programs, kv_heads, shared_splits)](
            *(q, keys, values, inputs.table, inputs.shared, inputs.sharing, *shared_parts),
            *numbers,
            rows,
            **sizes,
            QUERIES=max(16, triton.next_power_of_2(inputs.most_sharing * group)),
            TILE=tile,
            SPLITS=shared_splits,
            num_warps=4 if value_dim_up <= 64 else 8,
            num_stages=stages,
        )
    parts = parts_of(splits if splits > 1 else 0)
    sinks = out if sink is None else sink
    _decode_attention[(rows, kv_heads, splits)](
        *(q, keys, values, inputs.table, inputs.positions, inputs.active, out, *parts, shared, *shared_parts),
        sinks,
        *numbers,
        **sizes,
        **settings,
        GROUP_UP=max(16, triton.next_power_of_2(group)),
        SPLITS=splits,
        SHARED_SPLITS=shared_splits,
        WINDOW=int(window or 0),
        SINK=sink is not None,
    )
    if splits > 1:
        joined = {"HEADS": heads, "DIM": value_dim, "DIM_UP": value_dim_up, "SPLITS": splits}
        joined["SINK"] = sink is not None
        _join_splits[(rows, heads)](*parts, out, sinks, **joined, **early_launch(q.device), num_warps=1)
    return out


def tile_and_stages(token_bytes: int, largest: int) -> tuple[int, int]:
    """Tokens of a tile and how many tiles are loaded ahead: a tile's keys and values, once for each stage, stay below
    the shared memory of a multiprocessor (99 KB on consumer devices) whatever the head size and type."""
    limit = 96 << 10
    tile = largest if token_bytes <= 512 else 32
    while tile > 16 and tile * token_bytes > limit:
        tile //= 2
    return tile, max(1, min(3, limit // (tile * token_bytes)))
