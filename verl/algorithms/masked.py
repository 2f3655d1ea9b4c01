"""Sums, means and whitening over the positions a mask keeps.

Values at masked positions (NaN and infinities included) change neither value nor gradient of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.errors import DataError


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set, exact zeros elsewhere. A product would let NaN through."""
    return values.masked_fill(~as_bool(mask), 0)


def as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    kept = keep(values, mask)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    flags = as_bool(mask).expand_as(values)
    count = flags.sum() if axis is None else flags.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count.to(values.dtype) + 1e-8)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's policy tokens, [B]; 0 for a sequence without any."""
    return keep(values, mask).sum(-1) / as_bool(mask).sum(-1).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance over kept positions."""
    flags = as_bool(mask).expand_as(values)
    count = int(flags.sum())
    if count < 2:
        raise DataError(
            f"a variance needs at least 2 policy tokens in the batch, this one has {count}: responses are empty or "
            "masked out. Raise data.train_batch_size or data.max_response_length, or loosen what masks responses "
            "(overlong filtering, algorithm.rollout_correction.rollout_rs)"
        )
    centred = keep(values - masked_sum(values, flags) / count, flags)
    return centred.square().sum() / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Mean 0 (or the old mean, with `shift_mean=False`) and variance 1 over kept positions; zero elsewhere."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return keep(whitened if shift_mean else whitened + mean, mask)
