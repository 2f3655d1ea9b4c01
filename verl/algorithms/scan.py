"""Sums from a token to the end of its sequence, without a loop over tokens.

Positions with mask 0 take no time: gaps are closed first, so that neighbours are one step apart, and opened again
afterwards. Everything is done a block of rows at a time, so that temporaries stay in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import as_bool, keep, row_blocks


def reverse_cumsum(values: Tensor) -> Tensor:
    return values.flip(-1).cumsum(-1).flip(-1)


def rewards_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum of the rewards from each policy token on, zero where the mask is 0."""
    return discounted_returns(rewards, mask, 1.0)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G = r + gamma * G_next over policy tokens, zero where the mask is 0."""
    result = torch.empty_like(rewards)
    for rows in row_blocks(rewards):
        flags = as_bool(mask[rows])
        kept = keep(rewards[rows], flags)
        if gamma == 1:
            sums = reverse_cumsum(kept)
        else:
            gaps = Gaps(flags)
            sums = gaps.opened(_discounted_suffix_sum_(gaps.closed(kept), gamma))
        result[rows] = keep(sums, flags)
    return result


def advantage_scan(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A = delta + gamma * lam * A_next with delta = r + gamma * V_next - V over policy tokens, zero elsewhere.

    Past the last policy token rewards and values are zero, and with them delta: the recursion starts there by
    itself."""
    result = torch.empty_like(rewards)
    for rows in row_blocks(rewards):
        flags = as_bool(mask[rows])
        gaps = Gaps(flags)
        value = gaps.closed(keep(values[rows], flags))
        delta = gaps.closed(keep(rewards[rows], flags)) - value
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        result[rows] = keep(gaps.opened(_discounted_suffix_sum_(delta, gamma * lam)), flags)
    return result


class Gaps:
    """Moves policy tokens to the left of their row, and back. Does nothing where they stand there already."""

    def __init__(self, flags: Tensor) -> None:
        before = flags.cumsum(-1)
        has_gaps = bool((flags & (before != torch.arange(1, flags.shape[-1] + 1, device=flags.device))).any())
        self.place = (before - 1).clamp_(min=0) if has_gaps else None

    def closed(self, kept: Tensor) -> Tensor:
        """`kept` is zero off the mask, so that what is added from there changes nothing."""
        return kept if self.place is None else torch.zeros_like(kept).scatter_add_(-1, self.place, kept)

    def opened(self, closed: Tensor) -> Tensor:
        return closed if self.place is None else closed.gather(-1, self.place)


def _discounted_suffix_sum_(values: Tensor, factor: float) -> Tensor:
    """In place, by doubling: after round k each entry holds its discounted sum over the next 2^k positions."""
    reach = 1
    while reach < values.shape[-1] and factor > 0:
        values[:, :-reach] += factor * values[:, reach:]
        reach, factor = 2 * reach, factor * factor
    return values
