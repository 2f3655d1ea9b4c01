"""Estimators, losses and registries under the names and signatures plug-ins written for verl import.

Their home is `verl.algorithms`; functions here only put the arguments in the order that verl's callers use.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from torch import Tensor

from verl.algorithms import advantages
from verl.algorithms.aggregation import agg_loss, masked_mean, masked_sum, masked_var, masked_whiten
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.rollout_correction import compute_rollout_correction, rollout_probs_diff_metrics
from verl.config.methods import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    register_adv_est,
    register_policy_loss,
)

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_rollout_correction",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_policy_loss_prepare",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
    "rollout_probs_diff_metrics",
]

Pair = tuple[Tensor, Tensor]
"""(advantages, returns), both [B, T]."""


class AdvantageEstimator(StrEnum):
    """Values of `algorithm.adv_estimator`."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    OPO = "opo"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Pair:
    return advantages.gae(token_level_rewards, response_mask, values, gamma, lam)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Pair:
    return advantages.grpo(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo, config, epsilon=epsilon
    )


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    return advantages.grpo_passk(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo, config, epsilon=epsilon
    )


# Nothing is divided by a spread in those below: `epsilon`, which callers pass to all of them, has nothing to do.


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    return advantages.rloo(token_level_rewards, response_mask, index)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    return advantages.opo(token_level_rewards, response_mask, index)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    """`f_norm` divides the advantages."""
    found, _ = advantages.gpg(token_level_rewards, response_mask, index)
    return found / f_norm, found / f_norm


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    return advantages.reinforce_plus_plus_baseline(token_level_rewards, response_mask, index)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Pair:
    return advantages.reinforce_plus_plus(token_level_rewards, response_mask, config=config, **kwargs)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    return advantages.remax(token_level_rewards, response_mask, reward_baselines)


compute_policy_loss_vanilla = get_policy_loss_fn("vanilla")
compute_policy_loss_gspo = get_policy_loss_fn("gspo")
compute_policy_loss_sapo = get_policy_loss_fn("sapo")
compute_policy_loss_cispo = get_policy_loss_fn("cispo")
compute_policy_loss_gpg = get_policy_loss_fn("gpg")
compute_policy_loss_clip_cov = get_policy_loss_fn("clip_cov")
compute_policy_loss_kl_cov = get_policy_loss_fn("kl_cov")
compute_policy_loss_geo_mean = get_policy_loss_fn("geo_mean")
compute_policy_loss_dppo_tv = get_policy_loss_fn("dppo_tv")
compute_policy_loss_dppo_kl = get_policy_loss_fn("dppo_kl")
compute_policy_loss_dro = get_policy_loss_fn("dro")
