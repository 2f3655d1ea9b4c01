"""The critic's clipped regression."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.aggregation import agg_loss
from verl.algorithms.masked import keep, masked_mean


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """0.5 * max((v - R)^2, (clip(v, V - eps, V + eps) - R)^2), aggregated, and the share of tokens where the
    clipped term was the larger one. V are the values the advantages were made from."""
    vpreds, returns, values = (keep(x, response_mask) for x in (vpreds, returns, values))
    clipped = torch.maximum(torch.minimum(vpreds, values + cliprange_value), values - cliprange_value)
    plain_loss = (vpreds - returns).square()
    clipped_loss = (clipped - returns).square()
    loss = agg_loss(
        0.5 * torch.maximum(plain_loss, clipped_loss),
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
    return loss, masked_mean((clipped_loss > plain_loss).to(vpreds.dtype), response_mask).detach()
