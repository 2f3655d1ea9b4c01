"""From scores to advantages: KL penalty in the reward, the estimator, then masking.

Group statistics see every scored response; responses rejected by rollout correction or overlong filtering leave the
response mask, and with it the loss and its denominator, only afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from verl.algorithms import compute_rollout_correction, get_adv_estimator_fn
from verl.algorithms.kl import apply_kl_penalty
from verl.algorithms.registry import call_with_known
from verl.algorithms.sampling import mask_overlong, pf_ppo_indices
from verl.data.proto import DataProto
from verl.errors import RewardError

if TYPE_CHECKING:
    from verl.config.schema import AlgorithmConfig


def kl_in_reward(batch: DataProto, cfg: AlgorithmConfig, coef: float) -> tuple[torch.Tensor, float]:
    """Token-level rewards minus the KL penalty, and the mean KL for the adaptive controller."""
    tensors = batch.batch
    return apply_kl_penalty(
        tensors["token_level_scores"],
        tensors["old_log_probs"],
        tensors["ref_log_prob"],
        tensors["response_mask"],
        coef,
        cfg.kl_penalty,
    )


def estimate(batch: DataProto, cfg: AlgorithmConfig) -> None:
    """Add `advantages` and `returns` by the estimator `algorithm.adv_estimator` names."""
    function = get_adv_estimator_fn(cfg.adv_estimator)
    tensors = batch.batch
    offered: dict[str, Any] = {
        "token_level_rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "index": batch.non_tensor_batch["uid"],
        "config": cfg,
        "values": tensors.get("values"),
        "gamma": cfg.gamma,
        "lam": cfg.lam,
        "reward_baselines": tensors.get("reward_baselines"),
        "old_log_probs": tensors.get("old_log_probs"),
        "sum_pi_squared": tensors.get("sum_pi_squared"),
        "norm_adv_by_std_in_grpo": cfg.norm_adv_by_std_in_grpo,
    }
    if cfg.gdpo_reward_keys:
        offered["rewards_by_key"] = rewards_by_key(batch, cfg.gdpo_reward_keys)
    at_hand = {name: value for name, value in offered.items() if value is not None}
    what = f"the advantage estimator {cfg.adv_estimator!r}"
    tensors["advantages"], tensors["returns"] = call_with_known(function, at_hand, what)


def rewards_by_key(batch: DataProto, keys: list[str]) -> dict[str, torch.Tensor]:
    """One [B] tensor for each of the rewards that gdpo normalises separately."""
    extras = batch.non_tensor_batch["reward_extra"]
    failed = [error is not None for error in batch.non_tensor_batch["reward_error"]]
    for row, extra in enumerate(extras):
        missing = [key for key in keys if key not in extra]
        if missing and not failed[row]:
            raise RewardError(
                f"algorithm.gdpo_reward_keys names {missing[0]!r}, but the reward function returned only "
                f"{', '.join(sorted(extra)) or 'a score'}. Return a dict with a number for each of {keys}"
            )
    return {key: torch.tensor([float(extra.get(key, 0.0)) for extra in extras]) for key in keys}


def correct_rollout(batch: DataProto, cfg: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """Add importance weights to the batch; return the mask after rejection, and metrics."""
    tensors = batch.batch
    weights, mask, metrics = compute_rollout_correction(
        old_log_prob=tensors["old_log_probs"],
        rollout_log_prob=tensors["rollout_log_probs"],
        response_mask=tensors["response_mask"],
        config=cfg.rollout_correction,
    )
    if weights is not None:
        tensors["rollout_is_weights"] = weights
    return mask, {name: float(value) for name, value in metrics.items()}


def drop_overlong(batch: DataProto, mask: torch.Tensor) -> torch.Tensor:
    """Mask responses that were cut at the maximum length."""
    return mask_overlong(mask, [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])


def resample(batch: DataProto, cfg: AlgorithmConfig, generator: torch.Generator) -> DataProto:
    """PF-PPO: resample responses, weighted by their score; those without a score are not drawn."""
    scored = torch.tensor(
        [row for row, error in enumerate(batch.non_tensor_batch["reward_error"]) if error is None],
        dtype=torch.int64,
    )
    scores = batch.batch["token_level_scores"].sum(-1)[scored]
    rows = pf_ppo_indices(scores, cfg.pf_ppo.reweight_method, cfg.pf_ppo.weight_pow, generator)
    return batch[scored[rows]]
