"""One pass over a block of logits [M, C] (float32): statistics on the way forward, gradient on the way back.

The arithmetic is that of `verl.models.fused_linear`, in float32; each logit is read once.

Shapes: M rows (tokens), C columns (a slice of the vocabulary that begins at `first`).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from verl.models.fused_linear import HeadOptions

_BLOCK = 4096
"""Columns at a time, also of a last slice that has fewer: another number would be another kernel to compile."""


@triton.jit
def _statistics(
    x_ptr,
    target_ptr,
    top_ptr,
    total_ptr,
    weighted_ptr,
    squares_ptr,
    chosen_ptr,
    columns,
    row_stride,
    first,
    factor,
    cap,
    HAS_CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold a row's slice into its running maximum, sum of exponentials, their logit-weighted sum and squares."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(top_ptr + row)
    total = tl.load(total_ptr + row)
    weighted = tl.load(weighted_ptr + row) if ENTROPY else 0.0
    squares = tl.load(squares_ptr + row) if SQUARES else 0.0
    target = tl.load(target_ptr + row) - first
    base = x_ptr + row * row_stride
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(base + at, mask=inside, other=float("-inf"))
        if HAS_CAP:
            # tanh by exp: 1 - 2 / (exp(2 y) + 1), exact at both ends
            x = tl.where(inside, cap * (1 - 2 / (tl.exp(2 * x / cap) + 1)), float("-inf"))
        x = x * factor
        higher = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - higher)
        e = tl.exp(x - higher)
        total = total * shrink + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(inside, e * x, 0.0), 0)
        if SQUARES:
            squares = squares * shrink * shrink + tl.sum(e * e, 0)
        top = higher
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)
    if ENTROPY:
        tl.store(weighted_ptr + row, weighted)
    if SQUARES:
        tl.store(squares_ptr + row, squares)
    if (target >= 0) & (target < columns):
        y = tl.load(base + target)
        if HAS_CAP:
            y = cap * (1 - 2 / (tl.exp(2 * y / cap) + 1))
        tl.store(chosen_ptr + row, y * factor)


@triton.jit
def _gradient(
    x_ptr,
    out_ptr,
    target_ptr,
    lse_ptr,
    mean_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    columns,
    row_stride,
    first,
    factor,
    cap,
    HAS_CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d loss / d (raw logit), from the raw logit and the row's statistics."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    raw = tl.load(x_ptr + row * row_stride + at, mask=inside, other=0.0)
    slope = factor
    x = raw
    if HAS_CAP:
        bent = 1 - 2 / (tl.exp(2 * raw / cap) + 1)
        x = cap * bent
        slope = factor * (1 - bent * bent)
    x = x * factor
    p = tl.exp(x - tl.load(lse_ptr + row))
    grad_log_prob = tl.load(grad_log_prob_ptr + row)
    grad = -p * grad_log_prob
    if ENTROPY:
        grad -= p * tl.load(grad_entropy_ptr + row) * (x - tl.load(mean_ptr + row))
    target = tl.load(target_ptr + row) - first
    grad += tl.where(at == target, grad_log_prob, 0.0)
    tl.store(out_ptr + row * columns + at, (grad * slope).to(out_ptr.dtype.element_ty), mask=inside)


def fold_statistics(
    x: torch.Tensor,
    target: torch.Tensor,
    first: int,
    options: HeadOptions,
    top: torch.Tensor,
    total: torch.Tensor,
    weighted: torch.Tensor | None,
    squares: torch.Tensor | None,
    chosen: torch.Tensor,
) -> None:
    """Update the running statistics of every row in place with the raw logits `x` of columns from `first` on."""
    rows, columns = x.shape
    if rows == 0:
        return
    _statistics[(rows,)](
        x,
        target,
        top,
        total,
        weighted if weighted is not None else total,
        squares if squares is not None else total,
        chosen,
        columns,
        x.stride(0),
        first,
        options.factor,
        options.softcap or 1.0,
        HAS_CAP=options.softcap is not None,
        ENTROPY=weighted is not None,
        SQUARES=squares is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def logit_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    first: int,
    options: HeadOptions,
    lse: torch.Tensor,
    mean_logit: torch.Tensor | None,
    grad_log_prob: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[M, C] in `dtype`."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    with_entropy = mean_logit is not None and grad_entropy is not None
    _gradient[(rows, triton.cdiv(columns, _BLOCK))](
        x,
        out,
        target,
        lse,
        mean_logit if with_entropy else lse,
        grad_log_prob,
        grad_entropy if with_entropy else grad_log_prob,
        columns,
        x.stride(0),
        first,
        options.factor,
        options.softcap or 1.0,
        HAS_CAP=options.softcap is not None,
        ENTROPY=with_entropy,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out
