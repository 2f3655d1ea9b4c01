"""From a matrix of token losses to one number.

With the counts of the whole mini-batch given, the sum of the shares of its micro-batches (and the mean over ranks of
such sums) is the loss of the mini-batch, however it was split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from verl.algorithms.masked import as_bool, keep
from verl.errors import ConfigError

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

_bound: ContextVar[Mapping[str, Any] | None] = ContextVar("verl_loss_denominators", default=None)


@contextmanager
def loss_denominators(info: Mapping[str, Any]) -> Iterator[None]:
    """Bind the mini-batch's counts for `agg_loss` calls that name none of them, as losses written without
    `**config.global_batch_info` do. `info` holds keyword arguments of `agg_loss`."""
    token = _bound.set(info)
    try:
        yield
    finally:
        _bound.reset(token)


def batch_counts(response_mask: Tensor) -> dict[str, int]:
    """The two denominators of a mini-batch: policy tokens, and sequences that have any.

    A sequence that was masked out altogether (rejected, filtered, padding row) leaves both."""
    flags = as_bool(response_mask)
    return {"batch_num_tokens": int(flags.sum()), "global_batch_size": int(flags.any(-1).sum())}


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This matrix's share of the mini-batch's loss, times `dp_size` (which undoes the averaging over ranks).

    What is None is taken from the matrix at hand: its policy tokens, its sequences with at least one of them,
    its width.
    """
    bound = _bound.get()
    given = (batch_num_tokens, global_batch_size, loss_scale_factor)
    if bound is not None and all(value is None for value in given):
        dp_size = bound.get("dp_size", dp_size)
        batch_num_tokens = bound.get("batch_num_tokens")
        global_batch_size = bound.get("global_batch_size")
        loss_scale_factor = bound.get("loss_scale_factor")
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(
            f"loss_agg_mode={loss_agg_mode!r} is unknown; allowed: {', '.join(LOSS_AGG_MODES)} "
            f"(actor_rollout_ref.actor.loss_agg_mode)"
        )
    flags = as_bool(loss_mask)
    kept = keep(loss_mat, flags)
    if loss_agg_mode == "token-sum":
        return kept.sum() * dp_size
    if loss_agg_mode == "token-mean":
        tokens = flags.sum() if batch_num_tokens is None else batch_num_tokens
        return kept.sum() / _at_least_one(tokens) * dp_size
    per_sequence = kept.sum(-1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = per_sequence / flags.sum(-1).clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        if scale <= 0:
            raise ConfigError(
                f"loss_scale_factor={scale} must be above 0 (actor_rollout_ref.actor.loss_scale_factor; "
                f"leave it unset for data.max_response_length)"
            )
        per_sequence = per_sequence / scale
    sequences = flags.any(-1).sum() if global_batch_size is None else global_batch_size
    return per_sequence.sum() / _at_least_one(sequences) * dp_size


def _at_least_one(count: float | Tensor) -> float | Tensor:
    """A mini-batch without any policy token has loss 0, not 0/0."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
