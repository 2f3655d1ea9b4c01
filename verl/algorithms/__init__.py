"""Pure tensor maths: no I/O, no global random state, the same result on CPU and GPU.

Names are imported when first used, so that registering an estimator loads no torch.
"""

# ruff: noqa: F403
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.algorithms.aggregation import *
    from verl.algorithms.balance import *
    from verl.algorithms.groups import *
    from verl.algorithms.losses import *
    from verl.algorithms.rollout_correction import *
    from verl.algorithms.validation import *
    from verl.config.methods import *

_EXPORTS = {
    "aggregation": "LOSS_AGG_MODES agg_loss batch_counts loss_denominators masked_mean masked_sum masked_var "
    "masked_whiten KL_ESTIMATORS AdaptiveKLController FixedKLController apply_kl_penalty get_kl_controller kl_penalty",
    "balance": "karmarkar_karp padded_budget_batches sequence_work token_budget_batches",
    "groups": "constant_groups group_filter_values group_ids group_metrics mask_overlong overlong_penalty "
    "pf_ppo_indices",
    "losses": "compute_value_loss",
    "rollout_correction": "compute_rollout_correction corrects_rollout rollout_probs_diff_metrics "
    "takes_rollout_log_probs",
    "validation": "best_at_k majority_at_k pass_at_k validation_metrics worst_at_k",
}
_METHODS = (
    "adv_estimator_names call_with_known get_adv_estimator_fn get_policy_loss_fn get_policy_loss_prepare "
    "policy_loss_names register_adv_est register_policy_loss"
)
_MODULE = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names.split()}
_MODULE |= dict.fromkeys(_METHODS.split(), "verl.config.methods")
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return __all__
