"""Losses of a user's own loop: functions of log-probs as losses whose gradient does not depend on micro-batches."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from verl.algorithms import agg_loss, loss_denominators, policy_loss_names
from verl.data.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.observe.metrics import Metric
from verl.workers.roles import denominators

if TYPE_CHECKING:
    from verl.config.schema import ActorConfig, PPOConfig
    from verl.engines.base import LossFn, ModelOutput

CROSS_ENTROPY = "cross_entropy"
LossFunction = Callable[[torch.Tensor, DataProto], torch.Tensor]
"""(log_probs [b, T] with gradient, rows of the micro-batch) -> token losses [b, T], losses of sequences [b], or a
number that is the micro-batch's share of the loss (divided by counts in the rows' `meta_info`)."""


def cross_entropy(log_probs: torch.Tensor, batch: DataProto) -> torch.Tensor:
    """Of each token; what supervised fine-tuning minimises."""
    return -log_probs


def engine_loss(function: LossFunction, cfg: PPOConfig) -> LossFn:
    """As the engine calls it, with the denominators of the whole batch."""
    actor = cfg.actor_rollout_ref.actor
    scale = actor.loss_scale_factor or cfg.data.max_response_length

    def loss_fn(out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        info, mask = denominators(micro, scale), micro.batch["response_mask"]
        assert out.log_probs is not None
        with loss_denominators({**info, "dp_size": 1}):
            loss = function(out.log_probs, micro)
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        if shape == tuple(mask.shape):
            loss = agg_loss(loss, mask, actor.loss_agg_mode, **info)
        elif shape == (len(micro),):
            loss = torch.where(mask.any(-1), loss, 0.0).sum() / info["global_batch_size"] * info["dp_size"]
        elif shape == ():
            loss = loss * info["dp_size"]  # the gradients of ranks are averaged
        else:
            raise ConfigError(
                f"the loss function returned {shape}; it must return a tensor with one number, one for each row "
                f"[{len(micro)}], or one for each token {list(mask.shape)}"
            )
        if not loss.requires_grad:
            raise ConfigError(
                "the loss function's result does not depend on log_probs: nothing to learn from"
            )
        return loss, {"actor/loss": Metric(loss.detach() / info["dp_size"], "sum")}

    return loss_fn


def check_policy_rows(mini: DataProto, name: str, actor: ActorConfig, step: int) -> None:
    """Refuse a policy loss that is unknown, and rows it cannot be computed for at this step; advantages [B] become
    [B, T]."""
    known = [CROSS_ENTROPY, *policy_loss_names()]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"loss={name!r} is unknown; allowed: {', '.join(known)}, or a function (log_probs, batch).{hint}"
        )
    tensors, mask = mini.batch, mini.batch["response_mask"]
    if "advantages" not in tensors:
        raise DataError(
            f"the loss {name!r} needs advantages: set batch.batch['advantages'] to a tensor [B] or [B, T]; the "
            f"batch has: {', '.join(sorted(tensors))}"
        )
    advantages = tensors["advantages"]
    if advantages.dim() == 1:
        tensors["advantages"] = advantages = advantages[:, None] * mask
    if advantages.shape != mask.shape:
        raise DataError(
            f"advantages have the shape {list(advantages.shape)}; [B] or [B, T] like response_mask "
            f"{list(mask.shape)} is needed"
        )
    if actor.use_kl_loss and "ref_log_prob" not in tensors:
        raise DataError(
            "actor_rollout_ref.actor.use_kl_loss needs the reference: set batch.batch['ref_log_prob'] = "
            "session.log_probs(batch, reference=True)"
        )
    drawn = mini.non_tensor_batch.get("policy_version")
    if "old_log_probs" not in tensors and drawn is not None and any(v != step for v in drawn):
        raise DataError(
            f"the batch was sampled at step {min(drawn)} and this is step {step}: the loss {name!r} needs the "
            "log-probs from before: batch.batch['old_log_probs'] = session.log_probs(batch) right after sample()"
        )
