# mypy: disable-error-code="no-untyped-def"
"""The gated activation silu(gate) * up, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    gate = tl.load(gate_ptr + row * stride + offsets, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * stride + offsets, mask=inside, other=0.0)
    value = gate.to(tl.float32)
    act = (value / (1.0 + tl.exp(-value))).to(gate.dtype)
    tl.store(
        out_ptr + row * width + offsets, (act.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside
    )


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up [M, width] with one row stride (they may be halves of one buffer)."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    block = min(2048, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](
        gate, up, out, gate.stride(0), width, BLOCK=block, num_warps=max(1, min(8, block // 512))
    )
    return out
