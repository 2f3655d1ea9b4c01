"""Pure tensor maths: no I/O, no global random state, the same result on CPU and GPU.

Names are loaded when first used, so that importing the package (to register an estimator, say) costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "registry": (
        "adv_estimator_names",
        "call_with_known",
        "get_adv_estimator_fn",
        "get_policy_loss_fn",
        "get_policy_loss_prepare",
        "policy_loss_names",
        "register_adv_est",
        "register_policy_loss",
    ),
    "masked": ("masked_mean", "masked_sum", "masked_var", "masked_whiten"),
    "logits": ("entropy_from_logits", "logprobs_from_logits", "sum_pi_squared_from_logits"),
    "aggregation": ("LOSS_AGG_MODES", "agg_loss", "batch_counts", "loss_denominators"),
    "kl": (
        "KL_ESTIMATORS",
        "AdaptiveKLController",
        "FixedKLController",
        "apply_kl_penalty",
        "get_kl_controller",
        "kl_penalty",
    ),
    "value_loss": ("compute_value_loss",),
    "groups": ("group_ids", "group_metrics"),
    "balance": ("karmarkar_karp", "sequence_work", "token_budget_batches"),
    "rollout_correction": ("compute_rollout_correction", "rollout_probs_diff_metrics"),
    "sampling": (
        "constant_groups",
        "group_filter_values",
        "mask_overlong",
        "overlong_penalty",
        "pf_ppo_indices",
    ),
    "validation": ("best_at_k", "majority_at_k", "pass_at_k", "validation_metrics", "worst_at_k"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "FixedKLController",
    "adv_estimator_names",
    "agg_loss",
    "apply_kl_penalty",
    "batch_counts",
    "best_at_k",
    "call_with_known",
    "compute_rollout_correction",
    "compute_value_loss",
    "constant_groups",
    "entropy_from_logits",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_policy_loss_prepare",
    "group_filter_values",
    "group_ids",
    "group_metrics",
    "karmarkar_karp",
    "kl_penalty",
    "logprobs_from_logits",
    "loss_denominators",
    "majority_at_k",
    "mask_overlong",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "overlong_penalty",
    "pass_at_k",
    "pf_ppo_indices",
    "policy_loss_names",
    "register_adv_est",
    "register_policy_loss",
    "rollout_probs_diff_metrics",
    "sequence_work",
    "sum_pi_squared_from_logits",
    "token_budget_batches",
    "validation_metrics",
    "worst_at_k",
]

if TYPE_CHECKING:
    from verl.algorithms.aggregation import LOSS_AGG_MODES, agg_loss, batch_counts, loss_denominators
    from verl.algorithms.balance import karmarkar_karp, sequence_work, token_budget_batches
    from verl.algorithms.groups import group_ids, group_metrics
    from verl.algorithms.kl import (
        KL_ESTIMATORS,
        AdaptiveKLController,
        FixedKLController,
        apply_kl_penalty,
        get_kl_controller,
        kl_penalty,
    )
    from verl.algorithms.logits import entropy_from_logits, logprobs_from_logits, sum_pi_squared_from_logits
    from verl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
    from verl.algorithms.registry import (
        adv_estimator_names,
        call_with_known,
        get_adv_estimator_fn,
        get_policy_loss_fn,
        get_policy_loss_prepare,
        policy_loss_names,
        register_adv_est,
        register_policy_loss,
    )
    from verl.algorithms.rollout_correction import compute_rollout_correction, rollout_probs_diff_metrics
    from verl.algorithms.sampling import (
        constant_groups,
        group_filter_values,
        mask_overlong,
        overlong_penalty,
        pf_ppo_indices,
    )
    from verl.algorithms.validation import best_at_k, majority_at_k, pass_at_k, validation_metrics, worst_at_k
    from verl.algorithms.value_loss import compute_value_loss


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
