"""A policy loss over a matrix that does not fit the CPU's cache, a block of rows at a time.

Why a second path: at 8192 x 2048 tokens a loss makes some twenty temporaries of 64 MB, and the page faults of those
cost more than the arithmetic. A loss is a sum over rows once its denominators are known (that is what makes it
independent of micro-batches), so value and gradient of one block can be computed and its temporaries dropped
before the next. What comes out is the same loss; only a second derivative is not to be had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import counts_in_force
from verl.algorithms.masked import as_bool, row_blocks

Loss = Callable[..., "tuple[Tensor, dict[str, Any]]"]


class _ConfigWithCounts:
    """A config with other mini-batch counts; everything else is read through."""

    def __init__(self, config: Any, counts: Mapping[str, Any]) -> None:
        self._config = config
        self.global_batch_info = dict(counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient has been computed already."""

    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None


def in_blocks(prepare: Callable[..., dict[str, Tensor]] | None = None) -> Callable[[Loss], Loss]:
    """Decorator of a loss whose value is a sum over rows; `prepare` is its mini-batch hook, if it has one."""

    def decorate(loss: Loss) -> Loss:
        @functools.wraps(loss)
        def whole(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = "token-mean",
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
            prepared: Mapping[str, Tensor] | None = None,
            **more: Any,
        ) -> tuple[Tensor, dict[str, Any]]:
            if prepare is not None and prepared is None:
                prepared = prepare(old_log_prob, log_prob, advantages, response_mask, config)
            if prepared is not None:
                more["prepared"] = prepared
            blocks = row_blocks(log_prob.detach())
            if len(blocks) == 1:
                return loss(
                    old_log_prob=old_log_prob,
                    log_prob=log_prob,
                    advantages=advantages,
                    response_mask=response_mask,
                    loss_agg_mode=loss_agg_mode,
                    config=config,
                    rollout_is_weights=rollout_is_weights,
                    **more,
                )
            counted = _ConfigWithCounts(config, counts_in_force(config, response_mask))
            wants_gradient = torch.is_grad_enabled() and log_prob.requires_grad
            gradient = torch.empty_like(log_prob) if wants_gradient else None
            total = torch.zeros((), dtype=log_prob.dtype)
            sums: dict[str, Any] = {}
            tokens = 0
            for rows in blocks:
                leaf = log_prob[rows].detach().requires_grad_(wants_gradient)
                if prepared is not None:
                    more["prepared"] = {name: value[rows] for name, value in prepared.items()}
                share, metrics = loss(
                    old_log_prob=old_log_prob[rows],
                    log_prob=leaf,
                    advantages=advantages[rows],
                    response_mask=response_mask[rows],
                    loss_agg_mode=loss_agg_mode,
                    config=counted,
                    rollout_is_weights=None if rollout_is_weights is None else rollout_is_weights[rows],
                    **more,
                )
                if gradient is not None:
                    (gradient[rows],) = torch.autograd.grad(share, leaf)
                total += share.detach()
                count = int(as_bool(response_mask[rows]).sum())
                tokens += count
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0) + value * count
            means = {name: value / max(tokens, 1) for name, value in sums.items()}
            if gradient is None:
                return total, means
            return _KnownGradient.apply(log_prob, total, gradient), means

        return whole

    return decorate
