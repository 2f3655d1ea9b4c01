"""Registries and helpers under the path plug-ins import them from. Their home is `verl.algorithms`."""

from __future__ import annotations

from verl.algorithms.aggregation import agg_loss, masked_mean, masked_sum, masked_var, masked_whiten
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.registry import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    register_adv_est,
    register_policy_loss,
)
from verl.algorithms.rollout_correction import compute_rollout_correction, rollout_probs_diff_metrics

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "agg_loss",
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
