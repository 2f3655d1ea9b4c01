"""Advantage estimators: from token rewards to what each token did better than expected.

Each is called by keyword with `token_level_rewards` [B, T], `response_mask` [B, T], `index` (the prompt group of
each sequence), `config` (the algorithm section) and what else it needs, and returns (advantages, returns),
both [B, T] in the rewards' dtype, zero where the mask is 0. Values at masked positions have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl.algorithms.aggregation import Tensor, as_bool, keep, masked_whiten, sequence_mean, torch
from verl.algorithms.groups import Groups, scored_groups, spread
from verl.config.methods import F, register_adv_est
from verl.config.schema import AlgorithmConfig, PPOConfig

_DEFAULTS = AlgorithmConfig()
EPSILON = 1e-6
"""Added to the standard deviation of a group before dividing by it."""


def _group_estimator(
    name: str, needs: tuple[str, ...] = (), reads: tuple[str, ...] = (), **declared: Any
) -> Callable[[F], F]:
    """Register an estimator that compares the responses to one prompt."""
    return register_adv_est(name, needs=needs, reads=reads, compares_responses=True, **declared)


def _setting(given: Any, config: Any, name: str) -> Any:
    """The keyword argument, else the config's value, else the schema's default."""
    return given if given is not None else getattr(config, name, getattr(_DEFAULTS, name))


@register_adv_est("gae", needs=("values",), reads=("gamma", "lam"))
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: A = delta + gamma * lam * A_next with delta = r + gamma * V_next - V over
    policy tokens. Positions with mask 0 (tool tokens) are skipped: the next value and the next advantage pass over them
    unchanged. Past the last policy token rewards and values are zero, and with them delta: the recursion starts there
    by itself."""
    gamma, lam = _setting(gamma, config, "gamma"), _setting(lam, config, "lam")
    flags = as_bool(response_mask)
    compaction = _Compaction(flags)
    value = compaction.apply(keep(values, flags))
    delta = compaction.apply(keep(token_level_rewards, flags)) - value
    delta[:, :-1].add_(value[:, 1:], alpha=gamma)
    advantages = keep(compaction.undo(_discounted_suffix_sum_(delta, gamma * lam)), flags)
    returns = keep(advantages + values, response_mask)
    return masked_whiten(advantages, response_mask), returns


@_group_estimator("grpo_vectorized", reads=("norm_adv_by_std_in_grpo",))
@_group_estimator("grpo", reads=("norm_adv_by_std_in_grpo",))
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    epsilon: float = EPSILON,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(s - mean) / (std + epsilon) within the group; without the division it is Dr.GRPO."""
    normalise = _setting(norm_adv_by_std_in_grpo, config, "norm_adv_by_std_in_grpo")
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    advantages = spread(
        _group_normalised(scores, groups, normalise, epsilon), response_mask, token_level_rewards.dtype
    )
    return advantages, advantages


def _group_normalised(scores: Tensor, groups: Groups, by_std: bool, epsilon: float = EPSILON) -> Tensor:
    shifted = groups.shifted(scores)
    centred = shifted - groups.mean(shifted)
    return centred / (groups.std(shifted) + epsilon) if by_std else centred


@_group_estimator("grpo_passk", reads=("norm_adv_by_std_in_grpo",))
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    epsilon: float = EPSILON,
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
        lead = lead / (groups.std(groups.shifted(scores)) + epsilon)
    advantages = spread(lead, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@_group_estimator("rloo_vectorized")
@_group_estimator("rloo")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """The score less the mean of the group's other responses."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    shifted = groups.shifted(scores)
    advantages = spread(shifted - groups.others_mean(shifted), response_mask, token_level_rewards.dtype)
    return advantages, advantages


def _turn_rloo_advice(config: PPOConfig) -> Iterator[str]:
    if not config.actor_rollout_ref.rollout.converses:
        yield (
            "'algorithm.adv_estimator'=turn_rloo is the same as rloo without "
            "actor_rollout_ref.rollout.multi_turn.enable=True"
        )


@_group_estimator("turn_rloo", advice=_turn_rloo_advice)
def turn_rloo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """On the tokens of turn k: the rewards from turn k on, less the mean over the group's other responses of theirs
    from turn k on. A turn is a run of policy tokens without a gap.

    A response that ended before turn k counts 0 there: that is what it got from then on. The baseline depends on the
    others alone, so the gradient is unbiased also where the policy decides when to stop. Each turn's own reward,
    compared by turn number, is not: stopping would not be charged with what it gives up."""
    flags = as_bool(response_mask)
    starts = flags.clone()
    starts[:, 1:] &= ~flags[:, :-1]
    turn = (starts.cumsum(-1) - 1).clamp_(min=0)
    groups = Groups.of(index, flags.shape[0], flags.device)
    to_go = keep(rewards_to_go(token_level_rewards.to(torch.float64), flags), starts)
    # One column per turn; each entry gets one number, and zeros from the other positions.
    by_turn = torch.zeros_like(to_go).scatter_add_(-1, turn, to_go)
    shifted = groups.shifted(by_turn)
    per_turn = torch.stack([shifted - groups.others_mean(shifted), by_turn])
    advantages, returns = per_turn.gather(-1, turn.expand_as(per_turn)).to(token_level_rewards.dtype)
    return keep(advantages, flags), keep(returns, flags)


@_group_estimator("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """The score less the group's mean weighted by length, the optimal baseline of on-policy REINFORCE."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    lengths = as_bool(response_mask).sum(-1)
    shifted = groups.shifted(scores)
    baseline = groups.sum(lengths * shifted) / groups.sum(lengths).clamp(min=1)
    advantages = spread(shifted - baseline, response_mask, token_level_rewards.dtype)
    return advantages, advantages


@_group_estimator("gpg")
def gpg(token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """alpha * (s - group mean); alpha makes up for the sequences whose reward is 0."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    alpha = scores.shape[0] / torch.count_nonzero(scores).clamp(min=1)
    advantages = spread(
        alpha * _group_normalised(scores, groups, by_std=False), response_mask, token_level_rewards.dtype
    )
    return advantages, advantages


@register_adv_est("reinforce_plus_plus", needs=(), reads=("gamma",))
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


@_group_estimator("reinforce_plus_plus_baseline")
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


@register_adv_est("remax", needs=("reward_baselines",), reads=())
def remax(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Reward to go less the reward [B] of one greedy rollout of the same prompt."""
    returns = rewards_to_go(token_level_rewards, response_mask)
    return returns - spread(reward_baselines, response_mask, returns.dtype), returns


def _gdpo_errors(config: PPOConfig) -> Iterator[str]:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if not keys:
        yield (
            "'algorithm.adv_estimator' is gdpo; it needs 'algorithm.gdpo_reward_keys', e.g. [accuracy,format]"
        )
    if weights and len(weights) != len(keys):
        yield f"'algorithm.gdpo_reward_weights' has {len(weights)} numbers for {len(keys)} gdpo_reward_keys"


@_group_estimator(
    "gdpo",
    reads=("norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights"),
    check=_gdpo_errors,
)
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    rewards_by_key: Mapping[str, Tensor],
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each reward key [B] normalised within its groups separately, their weighted sum whitened over the batch:
    a key with a small range keeps its influence next to one with a large range.

    Keys and weights come from `config.gdpo_reward_keys` and `config.gdpo_reward_weights`; without keys, all of
    `rewards_by_key` count."""
    keys = list(getattr(config, "gdpo_reward_keys", None) or rewards_by_key)
    weights = list(getattr(config, "gdpo_reward_weights", None) or [1.0] * len(keys))
    by_std = _setting(norm_adv_by_std_in_grpo, config, "norm_adv_by_std_in_grpo")
    batch_size, device = response_mask.shape[0], response_mask.device
    groups = Groups.of(index, batch_size, device)
    total = torch.zeros(batch_size, dtype=torch.float64, device=device)
    for key, weight in zip(keys, weights, strict=True):
        scores = torch.as_tensor(rewards_by_key[key], dtype=torch.float64, device=device)
        total += weight * _group_normalised(scores, groups, by_std)
    advantages = masked_whiten(spread(total, response_mask, token_level_rewards.dtype), response_mask)
    return advantages, advantages


@_group_estimator("optimal_token_baseline", needs=("old_log_probs", "sum_pi_squared"))
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A baseline per group and policy token (the first of each member, the second, ...): the members' rewards to go,
    weighted by the accumulated squared norm of their score functions, w_t = 1 - 2 pi_t + sum pi^2.

    Beyond the length of the second-longest member there is nothing to compare with, and the baseline is 0."""
    batch_size, width = response_mask.shape
    groups = Groups.of(index, batch_size, response_mask.device)
    returns = rewards_to_go(token_level_rewards, response_mask)
    flags = as_bool(response_mask)
    score = 1 - 2 * keep(old_log_probs, flags).exp() + keep(sum_pi_squared, flags)
    weight = keep(keep(score, flags).cumsum(-1).to(returns.dtype), flags)
    compaction = _Compaction(flags)
    weighted, norm = returns.new_zeros(2, groups.count, width)
    weighted.index_add_(0, groups.ids, compaction.apply(returns * weight))
    norm.index_add_(0, groups.ids, compaction.apply(weight))
    baseline = weighted / (norm + 1e-8)
    position = torch.arange(width, device=returns.device)
    baseline.masked_fill_(position >= _second_largest(flags.sum(-1), groups).unsqueeze(-1), 0)
    return keep(returns - compaction.undo(baseline[groups.ids]), flags), returns


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


# -- PRIME: process rewards from an implicit reward model, a language model trained on outcomes alone ---------------
# The reward of a token is beta times the log-ratio of the model to its start, q = log pi - log pi_start; the sum over a
# response, as a logit, predicts the outcome. Both loss and gradient are sums over rows: they do not depend on how a
# mini-batch is cut.


def _prime_errors(config: PPOConfig) -> Iterator[str]:
    turns = config.actor_rollout_ref.rollout.multi_turn
    if turns.splits:
        yield (
            f"'algorithm.adv_estimator' is prime, but actor_rollout_ref.rollout.multi_turn.{turns.splits} makes "
            "several rows of a response, and its reward model judges a response as one row; use "
            f"{turns.one_row} or turn_rloo"
        )


@_group_estimator("prime", needs=("process_rewards",), check=_prime_errors)
def prime(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    process_rewards: Tensor,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Leave-one-out advantages of outcome and process, whitened: the score less the mean of the group's other
    responses, plus from each token to the end the process rewards, each less the mean over the others of the mean
    process reward of their tokens. A group of one has nothing to be compared with, and both are 0."""
    coefs = _setting(None, config, "prime")
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    shifted = groups.shifted(scores)
    returns = spread(
        coefs.outcome_coef * (shifted - groups.others_mean(shifted)), response_mask, torch.float64
    )
    if coefs.process_coef:
        rewards = keep(process_rewards, response_mask).double()
        baseline = groups.others_mean(sequence_mean(rewards, response_mask)).unsqueeze(-1)
        compared = keep(rewards - baseline, as_bool(response_mask) & (groups.sizes > 1).unsqueeze(-1))
        returns = returns + coefs.process_coef * rewards_to_go(compared, response_mask)
    returns = returns.to(token_level_rewards.dtype)
    return masked_whiten(returns, response_mask), returns


def implicit_rewards(log_prob: Tensor, start_log_prob: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """The reward of each token [B, T], zero where the mask is 0."""
    return beta * keep(log_prob - start_log_prob, response_mask)


def outcome_cross_entropy(rewards: Tensor, response_mask: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy [B] of the sum of a response's rewards, a logit [B], against its outcome (0 or 1), and that
    logit; 0 for a response without policy tokens."""
    logit = rewards.sum(-1)
    terms = torch.nn.functional.binary_cross_entropy_with_logits(
        logit, outcome.to(logit.dtype), reduction="none"
    )
    return keep(terms, as_bool(response_mask).any(-1)), logit.detach()
