# mypy: disable-error-code="no-untyped-def"
"""Rows of activations in eight bits: one program finds a row's largest number, scales and rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0


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
    _quantise_rows[(rows,)](
        x,
        out,
        scales,
        x.stride(0),
        width,
        LARGEST=FP8_MAX,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return out, scales
