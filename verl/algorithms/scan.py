"""Sums from a token to the end of its sequence, without a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import as_bool, keep


def reverse_cumsum(values: Tensor) -> Tensor:
    return values.flip(-1).cumsum(-1).flip(-1)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over policy tokens, [B, T]; positions with mask 0 take no time and are zero in
    the result."""
    flags = as_bool(mask)
    kept = keep(rewards, flags)
    if gamma == 1:
        return keep(reverse_cumsum(kept), flags)
    if not bool((flags[:, 1:] & ~flags[:, :-1]).any()):
        return keep(_discounted_suffix_sum(kept, gamma), flags)
    # Holes: close the gaps so that neighbours are one step apart, and open them again afterwards.
    place = (flags.cumsum(-1) - 1).clamp(min=0)
    closed = torch.zeros_like(kept).scatter_add_(-1, place, kept)
    return keep(_discounted_suffix_sum(closed, gamma).gather(-1, place), flags)


def _discounted_suffix_sum(values: Tensor, gamma: float) -> Tensor:
    """By doubling: after round s each entry holds its discounted sum over the next 2^s positions."""
    result, reach, factor = values.clone(), 1, gamma
    while reach < values.shape[-1] and factor > 0:
        result[:, :-reach] += factor * result[:, reach:]
        reach, factor = 2 * reach, factor * factor
    return result
