"""From groups of responses with rewards to pairs of a better and a worse one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.algorithms.groups import group_ids
from verl.algorithms.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Pairs:
    """P pairs of N responses, and what was compared without result."""

    chosen: Tensor
    """[P]: the number of the better response."""
    rejected: Tensor
    """[P]: of the worse one."""
    share: Tensor
    """[P], float64: what the pair counts; less than 1 where equally good responses share one place."""
    ties: Tensor
    """[N], float64: of each response its part in the comparisons that ended with equal rewards."""
    tied_groups: Tensor
    """[N], float64: 1 on the first response of each group in which no response is better than another."""

    @property
    def count(self) -> float:
        return float(self.share.sum())


def reward_pairs(rewards: Tensor, index: Any, usable: Tensor, how: str) -> Pairs:
    """Of the responses [N] that are `usable`, within groups (`index`, as in `group_ids`). `best_worst`: the best of
    each group against its worst; `all`: every pair with different rewards.

    Responses of equal reward are never a pair. Where several are equally good (or bad), the best (worst) is each of
    them with an equal share: which one comes first in the batch must not matter."""
    rewards = rewards.to(torch.float64)
    ties, tied_groups = torch.zeros_like(rewards), torch.zeros_like(rewards)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _members(index, usable):
        values = rewards[rows]
        better = values.unsqueeze(1) > values.unsqueeze(0)
        if not bool(better.any()):
            tied_groups[rows[0]] = 1
        if how == "best_worst":
            better &= (values == values.max()).unsqueeze(1) & (values == values.min()).unsqueeze(0)
            ties[rows[0]] += float(not bool(better.any()))
        else:
            ties[rows] += ((values.unsqueeze(1) == values.unsqueeze(0)).sum(1) - 1) / 2
        first, second = better.nonzero(as_tuple=True)
        one = torch.ones(len(first), dtype=torch.float64, device=rewards.device)
        found.append((rows[first], rows[second], one / len(first) if how == "best_worst" else one))
    return _joined(found, ties, tied_groups)


def data_pairs(from_data: Tensor, index: Any, usable: Tensor) -> Pairs:
    """The data's answer of each group (`from_data` [N]) against each of the others."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _members(index, usable):
        given, drawn = rows[from_data[rows]], rows[~from_data[rows]]
        pairs = torch.cartesian_prod(given, drawn)
        found.append((pairs[:, 0], pairs[:, 1], torch.ones(len(pairs), dtype=torch.float64)))
    nothing = torch.zeros(len(from_data), dtype=torch.float64, device=from_data.device)
    return _joined(found, nothing, nothing)


def win_rates(rewards: Tensor, index: Any, usable: Tensor) -> Tensor:
    """[N], float64: how probably each response is preferred to another of its group, sigmoid(difference of their
    rewards), averaged over the others; 1/2 where there is none."""
    rewards = rewards.to(torch.float64)
    rates = torch.full_like(rewards, 0.5)
    for rows in _members(index, usable):
        if len(rows) > 1:
            values = rewards[rows]
            wins = torch.sigmoid(values.unsqueeze(1) - values.unsqueeze(0)).sum(1) - 0.5  # not against itself
            rates[rows] = wins / (len(rows) - 1)
    return rates


def _members(index: Any, usable: Tensor) -> list[Tensor]:
    """The usable rows of each group that has some."""
    ids, _ = group_ids(index, usable.device)
    rows = usable.nonzero().squeeze(-1)
    if not len(rows):
        return []
    order = torch.argsort(ids[rows], stable=True)
    sizes = torch.unique_consecutive(ids[rows][order], return_counts=True)[1]
    return list(rows[order].split(sizes.tolist()))


def _joined(found: list[tuple[Tensor, Tensor, Tensor]], ties: Tensor, tied_groups: Tensor) -> Pairs:
    none = torch.empty(0, dtype=torch.long, device=ties.device)
    chosen, rejected, share = (
        torch.cat(parts) for parts in zip(*found, (none, none, none.to(torch.float64)), strict=True)
    )
    return Pairs(chosen, rejected, share, ties, tied_groups)
