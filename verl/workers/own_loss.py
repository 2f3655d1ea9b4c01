"""Losses of a user's own loop: functions of log-probs as losses whose gradient does not depend on micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from verl.algorithms import agg_loss, loss_denominators
from verl.data.proto import DataProto
from verl.errors import ConfigError
from verl.observe.metrics import Metric
from verl.workers.roles import denominators

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.engines.base import LossFn, ModelOutput

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
