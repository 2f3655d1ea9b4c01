# mypy: disable-error-code="no-untyped-def"
"""AdamW in one pass: reads the gradient as it is, updates master and moments, writes the rounded parameter.

The arithmetic is that of torch's AdamW, in float32; every number is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _adamw(
    param_ptr,
    master_ptr,
    first_ptr,
    second_ptr,
    grad_ptr,
    count,
    factor,
    rest1,
    beta2,
    rest2,
    eps,
    keep,
    rate,
    root_correction,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=0.0)
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    first = first + (grad - first) * rest1
    second = second * beta2 + grad * grad * rest2
    master = master * keep - rate * first / (tl.sqrt(second) * root_correction + eps)
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    tl.store(param_ptr + at, master.to(param_ptr.dtype.element_ty), mask=inside)


def adamw_step(
    param: torch.Tensor,
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    grad: torch.Tensor,
    *,
    updates: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: float,
) -> None:
    """One update in place; `updates` counts this one. All tensors contiguous, of one shape."""
    count = master.numel()
    if count == 0:
        return
    _adamw[(triton.cdiv(count, _BLOCK),)](
        param,
        master,
        first,
        second,
        grad,
        count,
        factor,
        # Differences from 1 are taken in double precision: float32 would lose half their digits.
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        1 - lr * weight_decay,
        lr / (1 - betas[0] ** updates),
        (1 - betas[1] ** updates) ** -0.5,
        BLOCK=_BLOCK,
        num_warps=8,
    )
