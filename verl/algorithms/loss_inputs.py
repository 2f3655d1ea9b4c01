"""What every policy loss starts from: cleaned inputs, the log-ratio, the clip range, settings with their keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import as_bool, keep, masked_mean
from verl.errors import ConfigError


@dataclass
class Inputs:
    """The tensors of one micro-batch, zero where the mask is 0 before any arithmetic is done with them (a NaN
    behind the mask would come back through the gradient of exp otherwise)."""

    old: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    delta: Tensor
    """logp - old, clamped where the loss asks for it."""

    @classmethod
    def of(
        cls,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        clamp: float | None = None,
    ) -> Inputs:
        mask = as_bool(response_mask)
        old, new = keep(old_log_prob, mask).detach(), keep(log_prob, mask)
        delta = new - old
        return cls(
            old,
            new,
            keep(advantages, mask).detach(),
            mask,
            delta if clamp is None else delta.clamp(-clamp, clamp),
        )

    @cached_property
    def ratio(self) -> Tensor:
        return self.delta.exp()

    def clean(self, values: Tensor) -> Tensor:
        return keep(values, self.mask)

    def mean(self, values: Tensor) -> Tensor:
        """Over policy tokens; takes flags as well as numbers."""
        if values.dtype == torch.bool:
            return (values & self.mask).sum() / (self.mask.sum() + 1e-8)
        return masked_mean(values, self.mask)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's policy tokens, [B]; 0 for a sequence without any."""
    return keep(values, mask).sum(-1) / as_bool(mask).sum(-1).clamp(min=1)


def loss_setting(config: Any, name: str, default: float, positive: bool = False) -> float:
    """A number of the actor section: of its `policy_loss` part where it stands there, else of the section itself."""
    part = getattr(config, "policy_loss", None)
    value = getattr(part, name, None)
    if value is None:
        value = getattr(config, name, None)
    value = default if value is None else value
    if positive and value <= 0:
        key = "policy_loss." + name if hasattr(part, name) else name
        raise ConfigError(f"actor_rollout_ref.actor.{key}={value} must be above 0 (default {default})")
    return value


def clip_range(config: Any) -> tuple[float, float]:
    """(low, high), each falling back to clip_ratio (0.2)."""
    both = loss_setting(config, "clip_ratio", 0.2)
    return loss_setting(config, "clip_ratio_low", both), loss_setting(config, "clip_ratio_high", both)
