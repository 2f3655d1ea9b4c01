"""Which tokens `clip_cov` and `kl_cov` treat apart: chosen by how a token's log-probability and advantage move
together, compared over the whole mini-batch.

Both choices are functions of the mini-batch alone: made once, before it is cut into micro-batches. Random numbers
are drawn on the CPU from a generator of their own, so that CPU and GPU choose alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.loss_inputs import Inputs, clip_range, loss_setting
from verl.algorithms.masked import masked_mean


def clipped_surrogate(x: Inputs, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(-A r, -A clip(r, 1 - low, 1 + high)); PPO takes the larger one."""
    return -x.advantages * x.ratio, -x.advantages * x.ratio.clamp(1 - low, 1 + high)


def token_covariance(x: Inputs) -> Tensor:
    """(A - mean A)(logp - mean logp), means over policy tokens."""
    log_prob = x.log_prob.detach()
    return (x.advantages - masked_mean(x.advantages, x.mask)) * (log_prob - masked_mean(log_prob, x.mask))


def clip_cov_choice(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """`clip_cov_dropped` [B, T]: the tokens that get loss 0. Without a generator, one is made from
    `config.policy_loss.seed`."""
    with torch.no_grad():
        x = Inputs.of(old_log_prob, log_prob, advantages, response_mask, clamp=20)
        plain, clipped = clipped_surrogate(x, *clip_range(config))
        covariance = token_covariance(x)
        above = covariance > loss_setting(config, "clip_cov_lb", 1.0)
        below = covariance < loss_setting(config, "clip_cov_ub", 5.0)
        candidates = (x.mask & (clipped <= plain) & above & below).flatten().nonzero().squeeze(-1)
        tokens = int(x.mask.sum())
        wanted = max(int(loss_setting(config, "clip_cov_ratio", 2e-4) * tokens), 1)
        if generator is None:
            generator = torch.Generator().manual_seed(int(loss_setting(config, "seed", 0)))
        shuffled = torch.randperm(len(candidates), generator=generator, device=generator.device)
        dropped = torch.zeros(x.mask.numel(), dtype=torch.bool, device=x.mask.device)
        dropped[candidates[shuffled[:wanted].to(candidates.device)]] = True
    return {"clip_cov_dropped": dropped.view_as(x.mask)}


def kl_cov_choice(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """`kl_cov_chosen` [B, T]: the tokens that get the KL term. Nothing random in it; ties go to the earlier one."""
    with torch.no_grad():
        x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
        tokens = int(x.mask.sum())
        wanted = min(max(1, int(tokens * loss_setting(config, "kl_cov_ratio", 2e-4))), tokens)
        covariance = token_covariance(x).masked_fill(~x.mask, -torch.inf).flatten()
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        chosen[torch.argsort(covariance, descending=True, stable=True)[:wanted]] = True
    return {"kl_cov_chosen": chosen.view_as(x.mask) & x.mask}
