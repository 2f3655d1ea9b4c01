"""Estimators, losses and registries under the names and signatures plug-ins written for verl import.

Their home is `verl.algorithms`; functions here only put the arguments in the order that verl's callers use.
"""

# ruff: noqa: F401 - names are imported from here

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from torch import Tensor

from verl.algorithms import advantages
from verl.algorithms.aggregation import (
    AdaptiveKLController,
    FixedKLController,
    agg_loss,
    get_kl_controller,
    kl_penalty,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.rollout_correction import compute_rollout_correction, rollout_probs_diff_metrics
from verl.config.methods import (
    ADV_ESTIMATOR,
    POLICY_LOSS,
    MethodFunctions,
    builtin_names,
    find_method,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    policy_loss_names,
    register_adv_est,
    register_policy_loss,
)

Pair = tuple[Tensor, Tensor]
"""(advantages, returns), both [B, T]."""


AdvantageEstimator = StrEnum(  # type: ignore[misc]
    "AdvantageEstimator", {name.upper(): name for name in builtin_names(ADV_ESTIMATOR)}
)
"""Values of `algorithm.adv_estimator`."""
ADV_ESTIMATOR_REGISTRY = MethodFunctions(ADV_ESTIMATOR)
POLICY_LOSS_REGISTRY = MethodFunctions(POLICY_LOSS)


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Pair:
    return advantages.gae(token_level_rewards, response_mask, values, gamma, lam)


def _normalised(estimator: Callable[..., Pair]) -> Callable[..., Pair]:
    def compute(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any,
        epsilon: float = 1e-6,
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
        **kwargs: Any,
    ) -> Pair:
        return estimator(
            token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo, config, epsilon=epsilon
        )

    return compute


def _centred(estimator: Callable[..., Pair]) -> Callable[..., Pair]:
    """Nothing is divided by a spread: `epsilon`, which callers pass all the same, has nothing to do."""

    def compute(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any,
        epsilon: float = 1e-6,
        config: Any = None,
        **kwargs: Any,
    ) -> Pair:
        return estimator(token_level_rewards, response_mask, index)

    return compute


compute_grpo_outcome_advantage = _normalised(advantages.grpo)
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_grpo_passk_outcome_advantage = _normalised(advantages.grpo_passk)
compute_rloo_outcome_advantage = _centred(advantages.rloo)
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_opo_outcome_advantage = _centred(advantages.opo)
compute_reinforce_plus_plus_baseline_outcome_advantage = _centred(advantages.reinforce_plus_plus_baseline)


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


def __getattr__(name: str) -> Any:
    """`compute_policy_loss_NAME` is the loss `loss_mode=NAME`."""
    loss = find_method(POLICY_LOSS, name.removeprefix("compute_policy_loss_"))
    if loss is None or not name.startswith("compute_policy_loss_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loss.function
