# mypy: disable-error-code="no-untyped-def"
"""RMS norm, the gated product of an MLP and rotary positions, each one kernel forward and one backward.

Numbers are rounded where the plain code rounds them, so that forward results are the same; in between the arithmetic is
float32. The backward passes save the inputs only.

Shapes: N rows (tokens), H columns (hidden or intermediate size).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PROGRAMS = 1024


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


@triton.jit(do_not_specialize=["rows"])
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


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    token,
    token_stride,
    head_stride,
    heads,
    half,
    at,
    cos1,
    cos2,
    sin1,
    sin2,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Both halves of every head of one token; results lie token by token, head by head."""
    head = tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (at < half)[None, :]
    x = x_ptr + token * token_stride + head * head_stride + at[None, :]
    out = out_ptr + (token * heads + head) * 2 * half + at[None, :]
    x1 = tl.load(x, mask=inside, other=0.0)
    x2 = tl.load(x + half, mask=inside, other=0.0)
    dtype = x1.dtype
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if BACKWARD:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = (x1 * cos1).to(dtype).to(tl.float32) - (x2 * sin1).to(dtype).to(tl.float32)
        y2 = (x2 * cos2).to(dtype).to(tl.float32) + (x1 * sin2).to(dtype).to(tl.float32)
    tl.store(out, y1.to(dtype), mask=inside)
    tl.store(out + half, y2.to(dtype), mask=inside)


@triton.jit
def _rotary(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    q_heads,
    k_heads,
    half,
    BACKWARD: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)
    inside = at < half
    cos = cos_ptr + token * 2 * half + at
    sin = sin_ptr + token * 2 * half + at
    cos1 = tl.load(cos, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    _rotate(
        q_ptr, q_out_ptr, token, q_token, q_head, q_heads, half, at, cos1, cos2, sin1, sin2, BACKWARD, Q_HEADS
    )
    _rotate(
        k_ptr, k_out_ptr, token, k_token, k_head, k_heads, half, at, cos1, cos2, sin1, sin2, BACKWARD, K_HEADS
    )


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


class _TwoProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, first, second)
        return torch.nn.functional.linear(x, first), torch.nn.functional.linear(x, second)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, *weights = ctx.saved_tensors
        left, right = (grad.reshape(-1, grad.shape[-1]) for grad in grads)
        rows = x.reshape(-1, x.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (left @ weights[0]).addmm_(right, weights[1]).view(x.shape)
        dfirst = left.t() @ rows if ctx.needs_input_grad[1] else None
        dsecond = right.t() @ rows if ctx.needs_input_grad[2] else None
        return dx, dfirst, dsecond


class _Gated(torch.autograd.Function):
    """Without `up` the last dimension of `gate` is gate, then up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        width, stride = gate.shape[-1] // (1 if up is not None else 2), gate.shape[-1]
        y = gate.new_empty(*gate.shape[:-1], width)
        if y.numel():
            grid, block = _gated_grid(y.numel() // width, width)
            second = gate[..., width:] if up is None else up
            _gated_forward[grid](gate, second, y, width, stride, BLOCK=block, num_warps=8)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        width, stride = grad.shape[-1], gate.shape[-1]
        dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        if grad.numel():
            grid, block = _gated_grid(grad.numel() // width, width)
            seconds = (gate[..., width:], dgate[..., width:]) if up is None else (up, dup)
            _gated_backward[grid](
                grad.contiguous(),
                gate,
                seconds[0],
                dgate,
                seconds[1],
                width,
                stride,
                BLOCK=block,
                num_warps=8,
            )
        return dgate, dup


def _launch_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    tokens, size = q.shape[2:]
    outs = [torch.empty(1, tokens, x.shape[1], size, dtype=x.dtype, device=x.device) for x in (q, k)]
    if tokens:
        _rotary[(tokens,)](
            q,
            k,
            outs[0],
            outs[1],
            cos,
            sin,
            q.stride(2),
            q.stride(1),
            k.stride(2),
            k.stride(1),
            q.shape[1],
            k.shape[1],
            size // 2,
            BACKWARD=backward,
            Q_HEADS=triton.next_power_of_2(q.shape[1]),
            K_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=triton.next_power_of_2(size // 2),
        )
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


@triton.jit
def _sum_copies(grad_ptr, order_ptr, bounds_ptr, sum_ptr, columns, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row: the sum of its copies, in the order of `order`."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.load(bounds_ptr + row)
    last = tl.load(bounds_ptr + row + 1)
    for start in range(first, last, COPIES):
        number = start + tl.arange(0, COPIES)
        copy = tl.load(order_ptr + number, mask=number < last, other=0)
        mask = (number < last)[:, None] & inside[None, :]
        part = tl.load(grad_ptr + copy[:, None] * columns + at[None, :], mask=mask, other=0.0)
        total += tl.sum(part.to(tl.float32), axis=0)
    tl.store(sum_ptr + row.to(tl.int64) * columns + at, total.to(sum_ptr.dtype.element_ty), mask=inside)


def sum_copies(grad: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, rows: int) -> torch.Tensor:
    """[M, ...] -> [rows, ...]: the sum over each row's copies, `order[bounds[i]:bounds[i + 1]]`; 0 for further rows."""
    known = len(bounds) - 1
    total = grad.new_empty(rows, *grad.shape[1:])
    total[known:].zero_()
    columns = total[:1].numel()
    block = min(triton.next_power_of_2(columns), 512)
    grid = (known, triton.cdiv(columns, block))
    _sum_copies[grid](grad, order, bounds, total, columns, COPIES=16, BLOCK=block)
    return total


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _launch_rotary(q, k, cos, sin, backward=False)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *_launch_rotary(grad_q, grad_k, cos, sin, backward=True), None, None


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the pairs (i, i + D/2) of each head by the angle of its position: q [1, H, N, D], k [1, K, N, D]; cos and
    sin [1, N, D] have no gradient."""
    return _Rotary.apply(q, k, cos, sin)  # type: ignore[no-any-return]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)), over the last dimension."""
    return _RMSNorm.apply(x, weight, eps)


def two_products(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x times the transpose of each; in the backward pass the second product adds to the first's gradient of x."""
    return _TwoProducts.apply(x, first, second)  # type: ignore[no-any-return]


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return _Gated.apply(gate, up)


def gated_joined(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where the last dimension of `both` is gate, then up."""
    return _Gated.apply(both, None)
