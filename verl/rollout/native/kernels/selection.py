# mypy: disable-error-code="no-untyped-def"
"""The smallest weight that top-k and top-p keep in each row, found on the device without sorting.

The floats of a row are not negative, so their bits order them like integers. The smallest bit pattern above which less
than the requested count or mass lies is searched for: every pass over the row tries seven patterns and narrows the
interval to an eighth, so ten passes are enough. Masses are sums of integers (units of 2^-44): exact in any order, equal
to those of `verl.rollout.sampling`, which defines what stays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WAYS = 8
PASSES = 10
RANGE = WAYS**PASSES
"""Bit patterns in the search: those of the floats below 2."""
BLOCK = 1024
_PROGRAMS = 1024


@triton.jit
def _narrow(
    weights_ptr,
    goals_ptr,
    floors_ptr,
    low_ptr,
    sums_ptr,
    new_low_ptr,
    new_sums_ptr,
    stride,
    vocab,
    span,
    step,
    last_step,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    way = tl.arange(0, WAYS)
    low = tl.full((), -1, tl.int32)
    if not FIRST:
        # What the programs of the pass before found above each of their patterns; the first is the row's total.
        cells = (row * SPLITS + tl.arange(0, SPLITS))[:, None] * WAYS + way[None, :]
        above = tl.sum(tl.load(sums_ptr + cells), 0)
        goal = tl.load(goals_ptr + row)
        if MASS:
            total = tl.sum(tl.where(way == 0, above, 0), 0)
            too_much = above.to(tl.float64) >= goal.to(tl.float64) * total.to(tl.float64)
        else:
            too_much = above >= goal
        passed = tl.sum(((way > 0) & too_much).to(tl.int32), 0)
        low = tl.load(low_ptr + row) + passed * last_step
    if split == 0:
        tl.store(new_low_ptr + row, low)
    if not LAST:
        patterns = tl.where(way == 0, -1, low + way * step)
        floor = tl.load(floors_ptr + row)
        found = tl.zeros((WAYS, BLOCK), tl.int64)
        for start in range(split * span, (split + 1) * span, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            weights = tl.load(weights_ptr + row * stride + offsets, mask=offsets < vocab, other=-1.0)
            bits = weights.to(tl.int32, bitcast=True)
            if MASS:
                amounts = tl.where(weights >= floor, weights * 17592186044416.0, 0.0).to(tl.int64)
            else:
                amounts = tl.full((BLOCK,), 1, tl.int64)
            found += tl.where(bits[None, :] > patterns[:, None], amounts[None, :], 0)
        cells = (row * SPLITS + split) * WAYS + way
        tl.store(new_sums_ptr + cells, tl.sum(found, 1))


def _search(weights: torch.Tensor, goals: torch.Tensor, floors: torch.Tensor, mass: bool) -> torch.Tensor:
    """[B]: the smallest float above which less than the goal lies (a count, or a part of the mass from `floors` on)."""
    rows, vocab = weights.shape
    splits = min(triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows)), triton.next_power_of_2(vocab) // BLOCK)
    splits = max(splits, 1)
    span = triton.cdiv(triton.cdiv(vocab, splits), BLOCK) * BLOCK
    lows = torch.empty(2, rows, dtype=torch.int32, device=weights.device)
    sums = torch.empty(2, rows, splits, WAYS, dtype=torch.int64, device=weights.device)
    for number in range(PASSES + 1):
        old, new = number % 2, 1 - number % 2
        last = number == PASSES
        pointers = (weights, goals, floors, lows[old], sums[old], lows[new], sums[new])
        _narrow[(rows, 1 if last else splits)](
            *pointers,
            weights.stride(0),
            vocab,
            span,
            RANGE // WAYS ** (number + 1),
            RANGE // WAYS**number,
            MASS=mass,
            FIRST=number == 0,
            LAST=last,
            SPLITS=splits,
            WAYS=WAYS,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return (lows[new] + 1).view(torch.float32)


def smallest_kept(
    weights: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """[B] for weights [B, V] (float32, at most 1): everything below goes. A row without a filter has `top_k` <= 0 or
    `top_p` >= 1 and keeps all."""
    floors = torch.zeros(len(weights), device=weights.device)
    if top_k is not None:
        goals = torch.where(top_k > 0, top_k, weights.shape[1] + 1).to(torch.int64)
        floors = _search(weights, goals, floors, mass=False)
    if top_p is not None:
        nucleus = _search(weights, torch.where(top_p < 1, top_p, 2.0), floors, mass=True)
        floors = torch.maximum(floors, nucleus)
    return floors
