"""From scores to advantages: KL penalty in the reward, the estimator, then masking.

Group statistics see every scored response; responses rejected by rollout correction or overlong filtering leave the
response mask, and with it the loss and its denominator, only afterwards. Rows that are turns of one conversation
(column `session`) are joined first and get what the conversation would get as one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from verl.algorithms import compute_rollout_correction, group_metrics
from verl.algorithms.aggregation import apply_kl_penalty
from verl.algorithms.groups import JoinedTokens, mask_overlong, pf_ppo_indices
from verl.config.methods import adv_estimator
from verl.data.proto import DataProto
from verl.errors import DataError, RewardError
from verl.workers.group import sessions_of

if TYPE_CHECKING:
    from verl.config.schema import AlgorithmConfig


def kl_in_reward(batch: DataProto, cfg: AlgorithmConfig, coef: float) -> tuple[torch.Tensor, float]:
    """Token-level rewards minus the KL penalty, and the mean KL for the adaptive controller."""
    tensors, rows = batch.batch, Conversations(batch)
    rewards, kl = apply_kl_penalty(
        rows.join(tensors["token_level_scores"]),
        rows.join(tensors["old_log_probs"]),
        rows.join(tensors["ref_log_prob"]),
        rows.join(tensors["response_mask"]),
        coef,
        cfg.kl_penalty,
    )
    return rows.cut(rewards), kl


def estimate(batch: DataProto, cfg: AlgorithmConfig) -> dict[str, float]:
    """Add `advantages` and `returns` by the estimator `algorithm.adv_estimator` names; metrics of its groups."""
    estimator = adv_estimator(cfg.adv_estimator)
    tensors, rows = batch.batch, Conversations(batch)
    index = batch.non_tensor_batch["uid"][rows.first.numpy()]
    names = ("token_level_rewards", "response_mask", "values", *estimator.needs, *estimator.parameters)
    columns = {name: "old_log_probs" if name == "old_log_prob" else name for name in names}
    offered: dict[str, Any] = {
        **{name: rows.join(tensors[column]) for name, column in columns.items() if column in tensors},
        "index": index,
        "config": cfg,
        "gamma": cfg.gamma,
        "lam": cfg.lam,
        "norm_adv_by_std_in_grpo": cfg.norm_adv_by_std_in_grpo,
    }
    if cfg.gdpo_reward_keys:
        by_key = rewards_by_key(batch, cfg.gdpo_reward_keys)
        offered["rewards_by_key"] = {key: values[rows.first] for key, values in by_key.items()}
    advantages, returns = estimator(**offered)
    tensors["advantages"], tensors["returns"] = rows.cut(advantages), rows.cut(returns)
    return group_metrics(offered["token_level_rewards"], offered["response_mask"], index)


class Conversations:
    """The rows of a batch, joined where they are turns of one conversation."""

    def __init__(self, batch: DataProto) -> None:
        sessions = sessions_of(batch)
        self.first = sessions.first
        self._tokens = None
        if "session" in batch.non_tensor_batch:
            self._tokens = JoinedTokens(sessions, batch.batch["response_mask"])

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """[B, T], or a number for each row [B], of whose rows the first one counts."""
        if self._tokens is None:
            return values
        return self._tokens.join(values) if values.dim() > 1 else values[self.first]

    def cut(self, joined: torch.Tensor) -> torch.Tensor:
        return joined if self._tokens is None else self._tokens.cut(joined)


def add_data_columns(batch: DataProto, names: Iterable[str]) -> None:
    """Add those of the columns [B] that the data has, where a method needs numbers of the data."""
    given = batch.non_tensor_batch.get("columns", ())
    for name in names:
        if name in batch.batch or not len(given) or not all(name in (row or {}) for row in given):
            continue
        try:
            batch.batch[name] = torch.tensor([float(row[name]) for row in given])
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the column {name!r} of the data must have a number in every row: {error}"
            ) from error


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
    tensors, rows = batch.batch, Conversations(batch)
    weights, mask, metrics = compute_rollout_correction(
        old_log_prob=rows.join(tensors["old_log_probs"]),
        rollout_log_prob=rows.join(tensors["rollout_log_probs"]),
        response_mask=rows.join(tensors["response_mask"]),
        config=cfg.rollout_correction,
    )
    if weights is not None:
        tensors["rollout_is_weights"] = rows.cut(weights)
    return rows.cut(mask), {name: float(value) for name, value in metrics.items()}


def drop_overlong(batch: DataProto, mask: torch.Tensor) -> torch.Tensor:
    """Mask responses that were cut at the maximum length; a conversation with all its turns."""
    sessions = sessions_of(batch)
    cut = torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])
    return mask_overlong(mask, (sessions.sum(cut.long()) > 0)[sessions.ids])


def resample(batch: DataProto, cfg: AlgorithmConfig, generator: torch.Generator) -> DataProto:
    """PF-PPO: resample responses, weighted by their score; those without a score are not drawn."""
    scored = torch.tensor(
        [row for row, error in enumerate(batch.non_tensor_batch["reward_error"]) if error is None],
        dtype=torch.int64,
    )
    scores = batch.batch["token_level_scores"].sum(-1)[scored]
    rows = pf_ppo_indices(scores, cfg.pf_ppo.reweight_method, cfg.pf_ppo.weight_pow, generator)
    return batch[scored[rows]]
