# mypy: disable-error-code="no-untyped-def"
"""RMS norm and the gated product of an MLP, each one kernel forward and one backward.

Numbers are rounded where the plain code rounds them, so that forward results are the same; in between the arithmetic is
float32. The backward passes save the inputs only.

Shapes: N rows (tokens), H columns (hidden or intermediate size).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PROGRAMS = 512


@triton.jit
def _rms_forward(x_ptr, weight_ptr, y_ptr, scale_ptr, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(scale_ptr + row, scale)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + at, (normed * weight).to(x.dtype), mask=inside)


@triton.jit
def _rms_backward(
    grad_ptr, x_ptr, weight_ptr, scale_ptr, dx_ptr, part_ptr, rows, stride, columns, BLOCK: tl.constexpr
):
    """Each program takes every n-th row and adds up its share of the weight's gradient."""
    first = tl.program_id(0)
    step = tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros([BLOCK], dtype=tl.float32)
    row = first.to(tl.int64)
    for _ in range(first, rows, step):
        x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        normed = x.to(tl.float32) * scale
        part += grad * normed.to(x.dtype).to(tl.float32)
        inner = grad * weight
        dx = scale * (inner - normed * (tl.sum(inner * normed, 0) / columns))
        tl.store(dx_ptr + row * columns + at, dx.to(x.dtype), mask=inside)
        row += step
    tl.store(part_ptr + first * columns + at, part, mask=inside)


@triton.jit
def _gated_forward(gate_ptr, up_ptr, y_ptr, columns, stride, BLOCK: tl.constexpr):
    """Rows of gate and up begin every `stride` numbers."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * stride + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * stride + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_ptr + row * columns + at, product, mask=inside)


@triton.jit
def _gated_backward(grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    grad = tl.load(grad_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    dgate = grad * up * sigmoid * (1.0 + wide * (1.0 - sigmoid))
    tl.store(dgate_ptr + row * stride + at, dgate.to(gate.dtype), mask=inside)
    tl.store(dup_ptr + row * stride + at, (grad * wide * sigmoid).to(gate.dtype), mask=inside)


def _warps(block: int) -> int:
    return 4 if block <= 1024 else 8 if block <= 4096 else 16


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        count, columns = rows.shape
        block = triton.next_power_of_2(columns)
        y = torch.empty(count, columns, dtype=x.dtype, device=x.device)
        scale = torch.empty(count, dtype=torch.float32, device=x.device)
        if count:
            _rms_forward[(count,)](
                rows, weight, y, scale, rows.stride(0), columns, eps, BLOCK=block, num_warps=_warps(block)
            )
        ctx.save_for_backward(rows, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # type: ignore[override]
        rows, weight, scale = ctx.saved_tensors
        count, columns = rows.shape
        block = triton.next_power_of_2(columns)
        programs = max(min(_PROGRAMS, count), 1)
        dx = torch.empty(count, columns, dtype=rows.dtype, device=rows.device)
        part = torch.zeros(programs, columns, dtype=torch.float32, device=rows.device)
        flat = grad.reshape(count, columns).contiguous()
        if count:
            _rms_backward[(programs,)](
                flat,
                rows,
                weight,
                scale,
                dx,
                part,
                count,
                rows.stride(0),
                columns,
                BLOCK=block,
                num_warps=_warps(block),
            )
        dweight = part.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx.view(grad.shape), dweight, None


def _gated_grid(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    block = min(triton.next_power_of_2(columns), 2048)
    return (rows, triton.cdiv(columns, block)), block


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        if gate.numel():
            width = gate.shape[-1]
            grid, block = _gated_grid(gate.numel() // width, width)
            _gated_forward[grid](gate, up, y, width, width, BLOCK=block, num_warps=8)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            width = gate.shape[-1]
            grid, block = _gated_grid(gate.numel() // width, width)
            _gated_backward[grid](
                grad.contiguous(), gate, up, dgate, dup, width, width, BLOCK=block, num_warps=8
            )
        return dgate, dup


class _GatedJoined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        both = both.contiguous()
        width = both.shape[-1] // 2
        y = both.new_empty(*both.shape[:-1], width)
        if y.numel():
            grid, block = _gated_grid(y.numel() // width, width)
            _gated_forward[grid](both, both[..., width:], y, width, 2 * width, BLOCK=block, num_warps=8)
        ctx.save_for_backward(both)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (both,) = ctx.saved_tensors
        width = both.shape[-1] // 2
        dboth = torch.empty_like(both)
        if grad.numel():
            grid, block = _gated_grid(grad.numel() // width, width)
            _gated_backward[grid](
                grad.contiguous(),
                both,
                both[..., width:],
                dboth,
                dboth[..., width:],
                width,
                2 * width,
                BLOCK=block,
                num_warps=8,
            )
        return dboth


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)), over the last dimension."""
    return _RMSNorm.apply(x, weight, eps)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return _Gated.apply(gate, up)


def gated_joined(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where the last dimension of `both` is gate, then up."""
    return _GatedJoined.apply(both)
