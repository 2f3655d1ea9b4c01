"""Advantage estimators: from token rewards to what each token did better than expected.

Each is called by keyword with `token_level_rewards` [B, T], `response_mask` [B, T], `index` (the prompt group of
each sequence), `config` (the algorithm section) and what else it needs, and returns (advantages, returns),
both [B, T] in the rewards' dtype, zero where the mask is 0. Values at masked positions have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.aggregation import as_bool, keep, masked_sum, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.config.schema import AlgorithmConfig
from verl.errors import ConfigError, DataError

_DEFAULTS = AlgorithmConfig()


def _setting(given: Any, config: Any, name: str) -> Any:
    """The keyword argument, else the config's value, else the schema's default."""
    return given if given is not None else getattr(config, name, getattr(_DEFAULTS, name))


def _need(value: Any, name: str, estimator: str, fix: str) -> Any:
    if value is None:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} needs {name}, which the batch lacks. {fix}".rstrip()
        )
    return value


@register_adv_est("gae")
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Positions with mask 0 (tool tokens) are skipped: the next value and the
    next advantage pass over them unchanged."""
    _need(values, "values", "gae", "Leave critic.enable unset or set it to True.")
    gamma, lam = _setting(gamma, config, "gamma"), _setting(lam, config, "lam")
    advantages = advantage_scan(token_level_rewards, values, response_mask, gamma, lam)
    returns = keep(advantages + values, response_mask)
    return masked_whiten(advantages, response_mask), returns


@register_adv_est("grpo")
@register_adv_est("grpo_vectorized")
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(s - mean) / (std + 1e-6) within the group; without the division it is Dr.GRPO."""
    normalise = _setting(norm_adv_by_std_in_grpo, config, "norm_adv_by_std_in_grpo")
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    advantages = spread(
        _group_normalised(scores, groups, normalise), response_mask, token_level_rewards.dtype
    )
    return advantages, advantages


def _group_normalised(scores: Tensor, groups: Groups, by_std: bool) -> Tensor:
    shifted = groups.shifted(scores)
    centred = shifted - groups.mean(shifted)
    return centred / (groups.std(shifted) + 1e-6) if by_std else centred


@register_adv_est("grpo_passk")
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Only the best response of a group learns, by its lead over the second; a tie at the top gives 0."""
    normalise = _setting(norm_adv_by_std_in_grpo, config, "norm_adv_by_std_in_grpo")
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    best = groups.extreme(scores, "amax")
    on_top = scores == best
    winner = on_top & (groups.sum(on_top) == 1) & (groups.sizes > 1)
    second = groups.extreme(scores.masked_fill(on_top, -torch.inf), "amax")
    lead = torch.where(winner, best - second, torch.zeros_like(best))
    if normalise:
        lead = lead / (groups.std(groups.shifted(scores)) + 1e-6)
    advantages = spread(lead, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@register_adv_est("rloo")
@register_adv_est("rloo_vectorized")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """The score less the mean of the group's other responses."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    shifted = groups.shifted(scores)
    others = (groups.sum(shifted) - shifted) / (groups.sizes - 1).clamp(min=1)
    advantages = spread(shifted - others, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@register_adv_est("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """The score less the group's mean weighted by length, the optimal baseline of on-policy REINFORCE."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    lengths = as_bool(response_mask).sum(-1)
    shifted = groups.shifted(scores)
    baseline = groups.sum(lengths * shifted) / groups.sum(lengths).clamp(min=1)
    advantages = spread(shifted - baseline, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@register_adv_est("gpg")
def gpg(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """alpha * (s - group mean); alpha makes up for the sequences whose reward is 0."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    alpha = scores.shape[0] / torch.count_nonzero(scores).clamp(min=1)
    advantages = spread(
        alpha * _group_normalised(scores, groups, by_std=False), response_mask, token_level_rewards.dtype
    )
    return advantages, advantages


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Discounted returns, whitened over the batch. Only policy tokens count as time steps."""
    returns = discounted_returns(token_level_rewards, response_mask, _setting(gamma, config, "gamma"))
    return masked_whiten(returns, response_mask), returns


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """The score less the group's mean, whitened over the batch's policy tokens."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    centred = spread(
        _group_normalised(scores, groups, by_std=False), response_mask, token_level_rewards.dtype
    )
    advantages = masked_whiten(centred, response_mask)
    return advantages, advantages


@register_adv_est("remax")
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Reward to go less the reward [B] of one greedy rollout of the same prompt."""
    _need(
        reward_baselines, "reward_baselines", "remax", "They are the scores of a greedy rollout per prompt."
    )
    returns = rewards_to_go(token_level_rewards, response_mask)
    return returns - spread(reward_baselines, response_mask, returns.dtype), returns


@register_adv_est("gdpo")
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    rewards_by_key: Mapping[str, Tensor] | None = None,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each reward key [B] normalised within its groups separately, their weighted sum whitened over the batch:
    a key with a small range keeps its influence next to one with a large range.

    Keys and weights come from `config.gdpo_reward_keys` and `config.gdpo_reward_weights`; without keys, all of
    `rewards_by_key` count."""
    rewards_by_key = _need(
        rewards_by_key,
        "rewards_by_key",
        "gdpo",
        "Let the reward function return a dict with several numbers and name them in algorithm.gdpo_reward_keys.",
    )
    keys = list(getattr(config, "gdpo_reward_keys", None) or rewards_by_key)
    weights = list(getattr(config, "gdpo_reward_weights", None) or [1.0] * len(keys))
    missing = [key for key in keys if key not in rewards_by_key]
    if missing:
        raise ConfigError(
            f"algorithm.gdpo_reward_keys names {', '.join(missing)}, which the reward function does not give; "
            f"it gives: {', '.join(rewards_by_key) or 'none'}"
        )
    if len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} keys ({', '.join(keys)})"
        )
    by_std = _setting(norm_adv_by_std_in_grpo, config, "norm_adv_by_std_in_grpo")
    batch_size, device = response_mask.shape[0], response_mask.device
    groups = Groups.of(index, batch_size, device)
    total = torch.zeros(batch_size, dtype=torch.float64, device=device)
    for key, weight in zip(keys, weights, strict=True):
        scores = torch.as_tensor(rewards_by_key[key], dtype=torch.float64, device=device)
        total += weight * _group_normalised(scores, groups, by_std)
    advantages = masked_whiten(spread(total, response_mask, token_level_rewards.dtype), response_mask)
    return advantages, advantages


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A baseline per group and position: the members' rewards to go, weighted by the accumulated squared norm of
    their score functions, w_t = 1 - 2 pi_t + sum pi^2.

    Beyond the second-longest member (counted up to its last policy token) there is nothing to compare with, and
    the baseline is 0."""
    _need(old_log_probs, "old_log_probs", "optimal_token_baseline", "")
    _need(sum_pi_squared, "sum_pi_squared", "optimal_token_baseline", "The trainer's log-prob pass gives it.")
    batch_size, width = response_mask.shape
    groups = Groups.of(index, batch_size, response_mask.device)
    returns = rewards_to_go(token_level_rewards, response_mask)
    flags = as_bool(response_mask)
    score = 1 - 2 * keep(old_log_probs, flags).exp() + keep(sum_pi_squared, flags)
    weight = keep(keep(score, flags).cumsum(-1).to(returns.dtype), flags)
    weighted, norm = returns.new_zeros(2, groups.count, width)
    weighted.index_add_(0, groups.ids, returns * weight)
    norm.index_add_(0, groups.ids, weight)
    baseline = weighted / (norm + 1e-8)
    position = torch.arange(1, width + 1, device=returns.device)
    extent = (flags * position).amax(-1) if width else position.new_zeros(batch_size)
    baseline.masked_fill_(position > _second_largest(extent, groups).unsqueeze(-1), 0)
    return keep(returns - baseline[groups.ids], flags), returns


def _second_largest(values: Tensor, groups: Groups) -> Tensor:
    """The second-largest value of each group [G], 0 where a group has one member. Sorting by value and then,
    stably, by group lines every group's values up in order."""
    by_value = torch.argsort(values, descending=True, stable=True)
    order = by_value[torch.argsort(groups.ids[by_value], stable=True)]
    sizes = torch.bincount(groups.ids, minlength=groups.count)
    second = sizes.cumsum(0) - sizes + 1
    found = values[order[second.clamp(max=max(len(values) - 1, 0))]]
    return torch.where(sizes > 1, found, torch.zeros_like(found))


# -- sums from a token to the end of its sequence ---------------------------------------------------------------
# Positions with mask 0 take no time: policy tokens are moved together first (`_Compaction`), and back afterwards.


def rewards_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum of the rewards from each policy token on, zero where the mask is 0."""
    return discounted_returns(rewards, mask, 1.0)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G = r + gamma * G_next over policy tokens, zero where the mask is 0."""
    flags = as_bool(mask)
    kept = keep(rewards, flags)
    if gamma == 1:
        return keep(kept.flip(-1).cumsum(-1).flip(-1), flags)
    compaction = _Compaction(flags)
    return keep(compaction.undo(_discounted_suffix_sum_(compaction.apply(kept), gamma)), flags)


def advantage_scan(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A = delta + gamma * lam * A_next with delta = r + gamma * V_next - V over policy tokens, zero elsewhere.

    Past the last policy token rewards and values are zero, and with them delta: the recursion starts there by
    itself."""
    flags = as_bool(mask)
    compaction = _Compaction(flags)
    value = compaction.apply(keep(values, flags))
    delta = compaction.apply(keep(rewards, flags)) - value
    delta[:, :-1].add_(value[:, 1:], alpha=gamma)
    return keep(compaction.undo(_discounted_suffix_sum_(delta, gamma * lam)), flags)


class _Compaction:
    """Moves policy tokens to the left of their row, and back. Does nothing where they are there already."""

    def __init__(self, flags: Tensor) -> None:
        count = flags.cumsum(-1)
        has_gaps = bool((flags & (count != torch.arange(1, flags.shape[-1] + 1, device=flags.device))).any())
        self.column = (count - 1).clamp_(min=0) if has_gaps else None

    def apply(self, kept: Tensor) -> Tensor:
        """`kept` is zero off the mask, so that what is added from there changes nothing."""
        return kept if self.column is None else torch.zeros_like(kept).scatter_add_(-1, self.column, kept)

    def undo(self, compact: Tensor) -> Tensor:
        return compact if self.column is None else compact.gather(-1, self.column)


def _discounted_suffix_sum_(values: Tensor, factor: float) -> Tensor:
    """In place, by doubling: after round k each entry holds its discounted sum over the next 2^k positions."""
    reach = 1
    while reach < values.shape[-1] and factor > 0:
        values[:, :-reach] += factor * values[:, reach:]
        reach, factor = 2 * reach, factor * factor
    return values


# -- groups -----------------------------------------------------------------------------------------------------


def group_ids(index: Any, device: torch.device | str = "cpu") -> tuple[Tensor, int]:
    """Group numbers 0..G-1 in order of first appearance, [B], and G. `index` is anything with one hashable
    entry per sequence: an object array or list of uids, numbers, a tensor."""
    if isinstance(index, Tensor):
        entries: Sequence[Any] = index.tolist()
    else:
        entries = index.tolist() if isinstance(index, np.ndarray) else list(index)
    number = {uid: at for at, uid in enumerate(dict.fromkeys(entries))}
    ids = np.fromiter(map(number.__getitem__, entries), dtype=np.int64, count=len(entries))
    return torch.from_numpy(ids).to(device), len(number)


@dataclass(frozen=True)
class Groups:
    """The responses to each prompt; every method maps a [B] vector to a [B] vector of its group's statistic.

    In float64: exact enough that a group of equal rewards gives exact zeros and that the order of additions does not
    show."""

    ids: Tensor
    count: int
    sizes: Tensor
    """[B], float64: members of the group each sequence belongs to."""

    @classmethod
    def of(cls, index: Any, batch_size: int, device: torch.device) -> Groups:
        ids, count = group_ids(index, device)
        if ids.shape[0] != batch_size:
            raise DataError(
                f"the group index has {ids.shape[0]} entries for a batch of {batch_size} sequences"
            )
        sizes = torch.bincount(ids, minlength=count).to(torch.float64)
        return cls(ids, count, sizes[ids] if batch_size else sizes)

    def sum(self, values: Tensor) -> Tensor:
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.ids, values.to(torch.float64))[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sizes

    def extreme(self, values: Tensor, how: str) -> Tensor:
        """`how`: amax or amin."""
        found = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        found.scatter_reduce_(0, self.ids, values, how, include_self=False)
        return found[self.ids]

    def shifted(self, scores: Tensor) -> Tensor:
        """Scores with the group's least one taken off. What only depends on differences is computed from these:
        equal scores are then exact zeros, and large ones lose no digits."""
        values = scores.to(torch.float64)
        return values - self.extreme(values, "amin")

    def std(self, values: Tensor) -> Tensor:
        """Unbiased; 0 for a group of one."""
        centred = values.to(torch.float64) - self.mean(values)
        return (self.sum(centred.square()) / (self.sizes - 1).clamp(min=1)).sqrt()


def sequence_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """s_i: the sum of a sequence's rewards over its policy tokens, [B], float64."""
    return masked_sum(token_level_rewards, response_mask, axis=-1).to(torch.float64)


def scored_groups(token_level_rewards: Tensor, response_mask: Tensor, index: Any) -> tuple[Tensor, Groups]:
    scores = sequence_scores(token_level_rewards, response_mask)
    return scores, Groups.of(index, scores.shape[0], scores.device)


def spread(per_sequence: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A number per sequence [B] onto each of its policy tokens [B, T]."""
    column = per_sequence.to(dtype).unsqueeze(-1)
    flags = response_mask if response_mask.dtype == dtype else as_bool(response_mask)
    return column * flags


def group_metrics(token_level_rewards: Tensor, response_mask: Tensor, index: Any) -> dict[str, float]:
    """How much a group estimator could learn from this batch: groups, those of one, and those whose rewards are
    all equal (groups of one included); both give advantage 0."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    share = 1 / groups.sizes
    constant = groups.extreme(scores, "amax") == groups.extreme(scores, "amin")
    return {
        "training/groups": float(groups.count),
        "training/groups_of_one": float((groups.sizes == 1).sum()),
        "training/groups_constant": float(share[constant].sum().round()),
    }
