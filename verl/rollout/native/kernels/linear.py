# mypy: disable-error-code="no-untyped-def"
"""Small matrix products in one kernel instead of several: query/key/value, and gate/up with the activation.

The weights stay where the module has them; a program finds out from its id which of them it reads. They may have
another type than the input, which decides the precision (`float32_arithmetic` widens inputs only). Worth it
for small models, where a product takes little longer than its launch; large ones use the vendor's library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _tile_product(
    x_ptr, w_ptr, rows_mask, row_offsets, columns, width_n, x_stride, inner, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """[BM, BN] of x [M, inner] times w [width_n, inner] transposed, in float32."""
    acc = tl.zeros([BM, BN], tl.float32)
    k_offsets = tl.arange(0, BK)
    for start in range(0, inner, BK):
        k = start + k_offsets
        k_mask = k < inner
        x = tl.load(
            x_ptr + row_offsets[:, None] * x_stride + k[None, :],
            mask=rows_mask[:, None] & k_mask[None, :],
            other=0.0,
        )
        w = tl.load(
            w_ptr + columns[None, :] * inner + k[:, None],
            mask=(columns < width_n)[None, :] & k_mask[:, None],
            other=0.0,
        )
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _joined_linear(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, out_ptr, rows, inner, x_stride, out_stride,
    N0, N1, N2, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    first = tl.cdiv(N0, BN)
    second = first + tl.cdiv(N1, BN)
    w_ptr = w0_ptr
    b_ptr = b0_ptr
    width = N0
    out_column = 0
    if tile >= second:
        w_ptr = w2_ptr
        b_ptr = b2_ptr
        width = N2
        out_column = N0 + N1
        tile -= second
    elif tile >= first:
        w_ptr = w1_ptr
        b_ptr = b1_ptr
        width = N1
        out_column = N0
        tile -= first
    row_offsets = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    rows_mask = row_offsets < rows
    columns = tile * BN + tl.arange(0, BN)
    acc = _tile_product(
        x_ptr, w_ptr, rows_mask, row_offsets, columns, width, x_stride, inner, BM, BN, BK, PRECISION
    )
    if BIAS:
        acc += tl.load(b_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + row_offsets[:, None] * out_stride + out_column + columns[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=rows_mask[:, None] & (columns < width)[None, :])


@triton.jit
def _gated_linear(
    x_ptr, gate_ptr, up_ptr, out_ptr, rows, inner, x_stride, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    row_offsets = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    rows_mask = row_offsets < rows
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    gate_acc = tl.zeros([BM, BN], tl.float32)
    up_acc = tl.zeros([BM, BN], tl.float32)
    k_offsets = tl.arange(0, BK)
    for start in range(0, inner, BK):
        k = start + k_offsets
        k_mask = k < inner
        x = tl.load(
            x_ptr + row_offsets[:, None] * x_stride + k[None, :],
            mask=rows_mask[:, None] & k_mask[None, :],
            other=0.0,
        )
        offsets = columns[None, :] * inner + k[:, None]
        mask = (columns < width)[None, :] & k_mask[:, None]
        gate_weight = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(x.dtype)
        up_weight = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(x.dtype)
        gate_acc = tl.dot(x, gate_weight, gate_acc, input_precision=PRECISION)
        up_acc = tl.dot(x, up_weight, up_acc, input_precision=PRECISION)
    dtype = out_ptr.dtype.element_ty
    gate = gate_acc.to(dtype).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (act * up_acc.to(dtype).to(tl.float32)).to(dtype)
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
    if rows <= 512:
        return {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def joined_linear(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """[M, inner] -> [M, N0 + N1 + N2], the outputs of three layers side by side."""
    rows, inner = x.shape
    widths = [weight.shape[0] for weight in weights]
    config = config or tiles(rows)
    out = torch.empty(rows, sum(widths), dtype=x.dtype, device=x.device)
    grid = (sum(triton.cdiv(width, config["BN"]) for width in widths), triton.cdiv(rows, config["BM"]))
    _joined_linear[grid](
        x,
        *weights,
        *(biases if biases is not None else weights),
        out,
        rows,
        inner,
        x.stride(0),
        out.stride(0),
        *widths,
        BIAS=biases is not None,
        PRECISION=_precision(x),
        **config,
    )
    return out


def gated_linear(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, config: dict[str, int] | None = None
) -> torch.Tensor:
    """[M, inner] -> [M, width]: silu(x gate^T) * (x up^T)."""
    rows, inner = x.shape
    width = gate.shape[0]
    config = config or tiles(rows)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, config["BN"]), triton.cdiv(rows, config["BM"]))
    _gated_linear[grid](x, gate, up, out, rows, inner, x.stride(0), width, PRECISION=_precision(x), **config)
    return out
