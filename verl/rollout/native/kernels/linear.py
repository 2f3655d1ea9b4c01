# mypy: disable-error-code="no-untyped-def"
"""The matrix products of small models' layers that are one kernel with what follows: rotation and cache write, or the
gated activation.

The weights stay where the module has them; a program finds out from its id which of them it reads. They may have
another type than the input, which decides the precision (`float32_arithmetic` widens inputs only). Worth it
for small models, where a product takes little longer than its launch; large ones use the vendor's library. Rounding is
that of the separate operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from verl.rollout.native.kernels.launch import early_launch, wait_for_inputs
from verl.rollout.native.kernels.rotary import _head_norm, _rotate, _stored

if TYPE_CHECKING:
    from verl.rollout.native.ops import DecodeInputs


@triton.jit
def _two_products(
    x_ptr, x_stride, inner, row_offsets, rows_mask, first_ptr, second_ptr, first_columns, second_columns, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Two [BM, BN] in float32: rows of x times rows of two weights [width, inner]."""
    first = tl.zeros([BM, BN], tl.float32)
    second = tl.zeros([BM, BN], tl.float32)
    for start in range(0, inner, BK):
        k = start + tl.arange(0, BK)
        k_mask = k < inner
        x = tl.load(
            x_ptr + row_offsets[:, None] * x_stride + k[None, :],
            mask=rows_mask[:, None] & k_mask[None, :],
            other=0.0,
        )
        first_mask = (first_columns < width)[None, :] & k_mask[:, None]
        second_mask = (second_columns < width)[None, :] & k_mask[:, None]
        first_w = tl.load(first_ptr + first_columns[None, :] * inner + k[:, None], mask=first_mask, other=0.0)
        second_w = tl.load(
            second_ptr + second_columns[None, :] * inner + k[:, None], mask=second_mask, other=0.0
        )
        first = tl.dot(x, first_w.to(x.dtype), first, input_precision=PRECISION)
        second = tl.dot(x, second_w.to(x.dtype), second, input_precision=PRECISION)
    return first, second


@triton.jit(do_not_specialize=["rows"])
def _qkv_rotary(
    x_ptr, wq_ptr, wk_ptr, wv_ptr, bq_ptr, bk_ptr, bv_ptr, q_out_ptr, keys_ptr, values_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, positions_ptr, active_ptr, table_ptr,
    rows, inner, x_stride, table_stride, trash, head_eps,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """One head (of queries, keys or values) of BM rows, as its two halves."""
    wait_for_inputs(EARLY)
    DIM: tl.constexpr = 2 * HALF
    head = tl.program_id(0)
    row_offsets = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    rows_mask = row_offsets < rows
    w_ptr = wq_ptr
    b_ptr = bq_ptr
    head_norm_ptr = q_norm_ptr
    kv_head = 0
    if head >= HEADS + KV:
        w_ptr = wv_ptr
        b_ptr = bv_ptr
        kv_head = head - HEADS - KV
    elif head >= HEADS:
        w_ptr = wk_ptr
        b_ptr = bk_ptr
        head_norm_ptr = k_norm_ptr
        kv_head = head - HEADS
    columns = tl.arange(0, HALF_UP)
    inside = columns < HALF
    base = tl.where(head < HEADS, head, kv_head) * DIM
    # Columns that only fill up the tile are read from no weight: their number is beyond the last.
    width = base + DIM
    first_columns = tl.where(inside, base + columns, width)
    second_columns = tl.where(inside, base + HALF + columns, width)
    first, second = _two_products(
        x_ptr, x_stride, inner, row_offsets, rows_mask, w_ptr, w_ptr, first_columns, second_columns, width,
        BM, HALF_UP, BK, PRECISION
    )  # fmt: skip
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    if BIAS:
        first += tl.load(b_ptr + first_columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        second += tl.load(b_ptr + second_columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = first.to(dtype)
    second = second.to(dtype)

    active = tl.load(active_ptr + row_offsets, mask=rows_mask, other=0) != 0
    position = tl.load(positions_ptr + row_offsets, mask=rows_mask & active, other=0)
    mask = rows_mask[:, None] & inside[None, :]
    if head < HEADS + KV:
        if HEAD_NORM:
            first, second = _head_norm(first, second, head_norm_ptr, head_eps, dtype, HALF, HALF_UP)
        angles = position[:, None] * DIM + columns[None, :]
        cos = tl.load(cos_ptr + angles, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=mask, other=0.0).to(tl.float32)
        first, second = _rotate(first, second, cos, sin, dtype)
    if head < HEADS:
        target = q_out_ptr + row_offsets[:, None] * (HEADS * DIM) + base + columns[None, :]
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)
    else:
        block = tl.load(
            table_ptr + row_offsets * table_stride + position // BLOCK_SIZE, mask=rows_mask & active, other=0
        )
        block = tl.where(active, block, trash).to(tl.int64)
        slot = (block * KV + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        offsets = slot[:, None] * DIM + columns[None, :]
        stored_first = _stored(first, keys_ptr.dtype.element_ty)
        stored_second = _stored(second, keys_ptr.dtype.element_ty)
        if head < HEADS + KV:
            tl.store(keys_ptr + offsets, stored_first, mask=mask)
            tl.store(keys_ptr + offsets + HALF, stored_second, mask=mask)
        else:
            tl.store(values_ptr + offsets, stored_first, mask=mask)
            tl.store(values_ptr + offsets + HALF, stored_second, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated_linear(
    x_ptr, gate_ptr, up_ptr, out_ptr, rows, inner, x_stride, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_inputs(EARLY)
    row_offsets = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    rows_mask = row_offsets < rows
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    gate, up = _two_products(
        x_ptr, x_stride, inner, row_offsets, rows_mask, gate_ptr, up_ptr, columns, columns, width,
        BM, BN, BK, PRECISION
    )  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (act * up.to(dtype).to(tl.float32)).to(dtype)
    target = out_ptr + row_offsets[:, None] * width + columns[None, :]
    tl.store(target, out, mask=rows_mask[:, None] & (columns < width)[None, :])


def tiles(rows: int) -> dict[str, int]:
    """Tile sizes by batch: few rows read weights in narrow strips, many rows reuse them."""
    if rows <= 16:
        return {"BM": 16, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
    if rows <= 32:
        return {"BM": 32, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
    if rows <= 128:
        return {"BM": 64, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 4}
    stages = 4 if rows <= 512 else 3
    return {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": stages}


def _settings(x: torch.Tensor, config: dict[str, int] | None) -> dict[str, Any]:
    """Tiles (those of float32 half as deep), precision and launch settings."""
    chosen = {**(config or tiles(x.shape[0])), **early_launch(x.device)}
    if x.dtype != torch.float32:
        return {**chosen, "PRECISION": "tf32"}
    return {**chosen, "BK": chosen["BK"] // 2, "PRECISION": "ieee"}


def qkv_rotary(
    x: torch.Tensor,
    layers: tuple[torch.nn.Linear, torch.nn.Linear, torch.nn.Linear],
    cache: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    inputs: DecodeInputs,
    head_norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """Queries, keys and values of x [M, D]; queries and keys normed by head and rotated, keys and values written to the
    cache; the queries [M, heads, dim]."""
    (keys, values), (cos, sin) = cache, rope
    _, positions, active, table = inputs[:4]
    blocks, kv_heads, block_size, dim = keys.shape
    rows, inner = x.shape
    heads = layers[0].out_features // dim
    q_norm, k_norm, head_eps = head_norms if head_norms is not None else (cos, cos, 0.0)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weights = [layer.weight for layer in layers]
    settings = _settings(x, config)
    del settings["BN"]  # a head
    q_out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    _qkv_rotary[(heads + 2 * kv_heads, triton.cdiv(rows, settings["BM"]))](
        *(x, *weights, *(biases or weights), q_out, keys, values),
        *(cos, sin, q_norm, k_norm, positions, active, table),
        *(rows, inner, x.stride(0), table.stride(0), blocks - 1, head_eps),
        HEADS=heads,
        KV=kv_heads,
        HALF=dim // 2,
        HALF_UP=max(16, triton.next_power_of_2(dim // 2)),
        BLOCK_SIZE=block_size,
        BIAS=bool(biases),
        HEAD_NORM=head_norms is not None,
        # As in `rotary_cache`: the modules round each product of a rotation.
        enable_fp_fusion=x.dtype == torch.float32,
        **settings,
    )
    return q_out


def gated_linear(
    x: torch.Tensor, gate: torch.nn.Linear, up: torch.nn.Linear, config: dict[str, int] | None = None
) -> torch.Tensor:
    """[M, D] -> [M, width]: silu(x gate^T) * (x up^T)."""
    rows, inner = x.shape
    width = gate.out_features
    settings = _settings(x, config)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, settings["BN"]), triton.cdiv(rows, settings["BM"]))
    _gated_linear[grid](x, gate.weight, up.weight, out, rows, inner, x.stride(0), width, **settings)
    return out
