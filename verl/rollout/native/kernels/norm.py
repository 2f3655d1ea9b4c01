# mypy: disable-error-code="no-untyped-def"
"""RMSNorm with the residual addition before it, one program per row.

The arithmetic and the order of summing are those of the trainer's norm (`verl.models.kernels.layers`), so that both
give the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
    ADD: tl.constexpr,
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
    tl.store(out_ptr + row * width + offsets, (weight.to(tl.float32) * normed).to(x.dtype), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, width], residual of the same shape or None; returns the norm of their sum, and the sum."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(rows,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        total,
        x.stride(0),
        width,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8 if block <= 4096 else 16,
    )
    return out, total
