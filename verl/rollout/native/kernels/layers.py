# mypy: disable-error-code="no-untyped-def"
"""Operations on rows between the products of a layer: RMSNorm with the residual addition before it, the gated
activation silu(gate) * up, and these results in eight bits.

The norm's arithmetic and order of summing are those of the trainer's (`verl.models.kernels.layers`), so that both give
the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    width,
    eps,
    scale_ptr,
    ADD: tl.constexpr,
    QUANTISE: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * width + offsets, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + offsets, x, mask=inside)
    value = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    normed = (value * scale).to(x.dtype).to(tl.float32)
    out = (weight.to(tl.float32) * normed).to(x.dtype)
    if QUANTISE:
        wide = out.to(tl.float32)
        out_scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / LARGEST
        tl.store(scale_ptr + row, out_scale)
        wide = tl.minimum(tl.maximum(wide / out_scale, -LARGEST), LARGEST)
        tl.store(out_ptr + row * width + offsets, wide.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + row * width + offsets, out, mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, width], residual of the same shape or None; returns the norm of their sum, and the sum."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, _launch_norm(x, residual, weight, eps, out, None)


def quantised_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """As `add_rms_norm`, the norm as e4m3 numbers and their scales (`quantise_rows`)."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return (out, scales), _launch_norm(x, residual, weight, eps, out, scales)


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the norm to `out`; returns the sum."""
    rows, width = x.shape
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    pointers = (x, x if residual is None else residual, weight, out, total)
    _add_rms_norm[(rows,)](
        *pointers,
        x.stride(0),
        width,
        eps,
        out if scales is None else scales,
        ADD=residual is not None,
        QUANTISE=scales is not None,
        LARGEST=FP8_MAX,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8 if block <= 4096 else 16,
    )
    return total


@triton.jit
def _gated_activation(gate_ptr, up_ptr, offsets, inside):
    """silu(gate) * up, each rounded to the inputs' type."""
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0)
    value = gate.to(tl.float32)
    act = (value / (1.0 + tl.exp(-value))).to(gate.dtype)
    return (act.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    value = _gated_activation(gate_ptr + row * stride, up_ptr + row * stride, offsets, inside)
    tl.store(out_ptr + row * width + offsets, value, mask=inside)


@triton.jit
def _quantised_silu_mul(
    gate_ptr, up_ptr, out_ptr, scale_ptr, stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * stride
    up_ptr += row * stride
    peak = 0.0
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = _gated_activation(gate_ptr, up_ptr, offsets, offsets < width).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(value), 0))
    scale = tl.maximum(peak, 1e-12) / LARGEST
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < width
        value = _gated_activation(gate_ptr, up_ptr, offsets, inside).to(tl.float32)
        value = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
        tl.store(out_ptr + row * width + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up [M, width] with one row stride (they may be halves of one buffer)."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    block = min(2048, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](
        gate, up, out, gate.stride(0), width, BLOCK=block, num_warps=max(1, min(8, block // 512))
    )
    return out


def quantised_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `silu_mul`, as e4m3 numbers and their scales (`quantise_rows`)."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=gate.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=gate.device)
    block = min(4096, triton.next_power_of_2(width))
    settings = {"LARGEST": FP8_MAX, "BLOCK": block, "num_warps": max(1, min(8, block // 512))}
    _quantised_silu_mul[(rows,)](gate, up, out, scales, gate.stride(0), width, **settings)
    return out, scales


@triton.jit
def _quantise_rows(x_ptr, out_ptr, scale_ptr, stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = 0.0
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + offsets, mask=offsets < width, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(x), 0))
    scale = tl.maximum(peak, 1e-12) / LARGEST
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < width
        x = tl.load(x_ptr + row * stride + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
        tl.store(out_ptr + row * width + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, width] (unit stride within a row) -> e4m3 [M, width] and scales [M, 1] in float32."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(width))
    settings = {"LARGEST": FP8_MAX, "BLOCK": block, "num_warps": max(1, min(8, block // 512))}
    _quantise_rows[(rows,)](x, out, scales, x.stride(0), width, **settings)
    return out, scales
