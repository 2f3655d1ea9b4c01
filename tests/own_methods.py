"""A plug-in (`trainer.plugins`) that asks for everything a method can ask for; tests copy the file."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl import register_adv_est, register_policy_loss
from verl.algorithms import agg_loss, masked_mean

RESPONSES = 4
"""`rollout.n` of the tests."""


@register_adv_est("own_estimator", needs=("values", "reward_baselines"))
def own_estimator(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, reward_baselines: Tensor
) -> tuple[Tensor, Tensor]:
    """The score less that of a greedy response and half the critic's value."""
    returns = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return (returns - reward_baselines[:, None] - values / 2) * response_mask, returns


@register_policy_loss("own_loss", needs=("ref_log_prob", "weight"), whole_groups=True)
def own_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    weight: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """A policy gradient that stays close to the reference, each row weighted by the column `weight` of the data."""
    groups = weight.view(-1, RESPONSES)
    assert bool((groups == groups[:, :1]).all()), "a group of responses was cut"
    losses = weight[:, None] * ((log_prob - ref_log_prob).square() - advantages * log_prob)
    loss = agg_loss(losses, response_mask, config.loss_agg_mode, **config.global_batch_info)
    return loss, {"distance": masked_mean((log_prob - ref_log_prob).abs(), response_mask).detach()}
