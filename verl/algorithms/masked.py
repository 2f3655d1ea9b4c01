"""Sums, means and whitening over the positions a mask keeps.

What always holds: whatever stands on a masked position (NaN and infinities included) changes neither the value
nor the gradient of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import DataError

CACHE_ELEMENTS = 1 << 17


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set, exact zeros elsewhere. A product would let NaN through."""
    return values.masked_fill(~as_bool(mask), 0)


def as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def row_blocks(values: Tensor) -> list[slice]:
    """Rows to work on at a time: on the CPU, as many as fit its cache (temporaries the size of a whole batch cost
    more in page faults than the arithmetic does); elsewhere, and where a gradient is wanted, all of them."""
    rows = values.shape[0]
    if values.dim() < 2 or values.requires_grad or values.device.type != "cpu":
        return [slice(0, rows)]
    step = max(CACHE_ELEMENTS // max(values.shape[1:].numel(), 1), 1)
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)] or [slice(0, rows)]


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    kept = keep(values, mask)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    flags = as_bool(mask).expand_as(values)
    count = flags.sum() if axis is None else flags.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count.to(values.dtype) + 1e-8)


def _enough_for_a_variance(count: int) -> None:
    if count < 2:
        raise DataError(
            f"a variance needs at least 2 policy tokens in the batch, this one has {count}: the responses are empty "
            f"or masked out. Raise data.train_batch_size or data.max_response_length, or loosen what masks responses "
            f"(overlong filtering, algorithm.rollout_correction.rollout_rs)"
        )


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance over kept positions."""
    flags = as_bool(mask).expand_as(values)
    count = int(flags.sum())
    _enough_for_a_variance(count)
    centred = keep(values - masked_sum(values, flags) / count, flags)
    return centred.square().sum() / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Mean 0 (or the old mean, with `shift_mean=False`) and variance 1 over kept positions; zero elsewhere."""
    blocks = row_blocks(values)
    if len(blocks) == 1:
        mean = masked_mean(values, mask)
        whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
        return keep(whitened if shift_mean else whitened + mean, mask)
    count = sum(int(as_bool(mask[rows]).sum()) for rows in blocks)
    _enough_for_a_variance(count)
    total = torch.stack([masked_sum(values[rows], mask[rows]) for rows in blocks]).sum()
    mean = total / (count + 1e-8)
    centred = [keep(values[rows] - total / count, mask[rows]).square_().sum() for rows in blocks]
    scale = torch.rsqrt(torch.stack(centred).sum() / (count - 1) + 1e-8)
    result = torch.empty_like(values)
    for rows in blocks:
        part = (values[rows] - mean).mul_(scale)
        result[rows] = keep(part if shift_mean else part.add_(mean), mask[rows])
    return result
