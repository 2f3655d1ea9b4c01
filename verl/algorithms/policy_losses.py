"""Policy losses: how the log-probabilities of the tokens taken should move, given their advantages.

Each is called by keyword with `old_log_prob`, `log_prob`, `advantages`, `response_mask` (all [B, T]),
`loss_agg_mode`, `config` (the actor section or anything with its attributes) and `rollout_is_weights`, and
returns (loss, metrics). Metrics are means over the policy tokens at hand.

What always holds: what stands on masked positions changes neither loss nor gradient; with the mini-batch's counts
in `config.global_batch_info` (keyword arguments of `agg_loss`), the shares of micro-batches and ranks add up to
the loss of the mini-batch. Losses that compare tokens across it (clip_cov, kl_cov) choose them in a `prepare`
step over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import agg_loss
from verl.algorithms.blocked import in_blocks
from verl.algorithms.covariance import clip_cov_choice, clipped_surrogate, kl_cov_choice
from verl.algorithms.loss_inputs import Inputs, clip_range, loss_setting, sequence_mean
from verl.algorithms.masked import masked_mean
from verl.algorithms.registry import register_policy_loss
from verl.errors import ConfigError

Result = tuple[Tensor, dict[str, Any]]
SEQUENCE_MODE = "seq-mean-token-mean"


def _finish(
    token_loss: Tensor, x: Inputs, mode: str, config: Any, weights: Tensor | None, metrics: dict[str, Any]
) -> Result:
    """Rollout-correction weights, aggregation, and the metric all losses share."""
    if weights is not None:
        token_loss = token_loss * x.clean(weights).detach()
    loss = agg_loss(token_loss, x.mask, mode, **(getattr(config, "global_batch_info", None) or {}))
    metrics = {name: value.detach() for name, value in metrics.items()}
    return loss, metrics | {"actor/ppo_kl": x.mean(-x.delta.detach())}


@register_policy_loss("vanilla")
@in_blocks()
def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """PPO with separate clip ranges below and above 1 and a bound on the loss of negative advantages (dual clip)."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask, clamp=20)
    low, high = clip_range(config)
    bound = loss_setting(config, "clip_ratio_c", 3.0)
    if bound <= 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c={bound} must be above 1 (default 3.0)")
    plain, clipped = clipped_surrogate(x, low, high)
    pessimistic = torch.maximum(plain, clipped)
    ceiling = -x.advantages * bound
    negative = x.advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic)
    metrics = {
        "actor/pg_clipfrac": x.mean(clipped > plain),
        "actor/pg_clipfrac_lower": x.mean(negative & (pessimistic > ceiling)),
    }
    return _finish(losses, x, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss("gspo")
@in_blocks()
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = SEQUENCE_MODE,
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """PPO on the ratio of whole sequences (geometric mean over tokens); the gradient still reaches every token.
    Always aggregated seq-mean-token-mean, which is part of the method."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    low, high = clip_range(config)
    log_ratio = x.log_prob - x.log_prob.detach() + sequence_mean(x.delta, x.mask).detach().unsqueeze(-1)
    ratio = log_ratio.clamp(max=10).exp()
    plain, clipped = -x.advantages * ratio, -x.advantages * ratio.clamp(1 - low, 1 + high)
    metrics = {"actor/pg_clipfrac": x.mean(clipped > plain)}
    return _finish(torch.maximum(plain, clipped), x, SEQUENCE_MODE, config, rollout_is_weights, metrics)


@register_policy_loss("sapo")
@in_blocks()
def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = SEQUENCE_MODE,
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """A smooth gate instead of a clip: its slope is 1 at ratio 1 and fades on both sides. Always aggregated
    seq-mean-token-mean, which is part of the method."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask, clamp=20)
    tau_pos = loss_setting(config, "tau_pos", 1.0, positive=True)
    tau_neg = loss_setting(config, "tau_neg", 1.05, positive=True)
    tau = torch.where(x.advantages > 0, tau_pos, tau_neg).to(x.ratio.dtype)
    gate = torch.sigmoid(tau * (x.ratio - 1)) * (4 / tau)
    return _finish(-x.advantages * gate, x, SEQUENCE_MODE, config, rollout_is_weights, {})


@register_policy_loss("cispo")
@in_blocks()
def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """REINFORCE with clipped importance weights: no token loses its gradient."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    low, high = clip_range(config)
    ratio = x.ratio.detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    metrics = {"actor/pg_clipfrac": x.mean(ratio != clipped)}
    losses = -clipped * x.advantages * x.log_prob
    return _finish(losses, x, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss("gpg")
@in_blocks()
def gpg_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """Plain policy gradient."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    return _finish(-x.log_prob * x.advantages, x, loss_agg_mode, config, rollout_is_weights, {})


def _prepared_flags(prepared: Mapping[str, Tensor] | None, name: str, x: Inputs) -> Tensor:
    if prepared is None or name not in prepared:
        raise ConfigError(
            f"the loss needs {name!r}, which its prepare hook gives (get_policy_loss_prepare); "
            f"it was handed {', '.join(prepared or ()) or 'nothing'}"
        )
    return prepared[name].to(x.mask.device, torch.bool) & x.mask


@register_policy_loss("clip_cov", prepare=clip_cov_choice)
@in_blocks(prepare=clip_cov_choice)
def clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    prepared: Mapping[str, Tensor] | None = None,
    **_: Any,
) -> Result:
    """PPO that leaves out a few randomly chosen tokens among those whose log-probability and advantage move
    together, the ones that cost entropy."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask, clamp=20)
    dropped = _prepared_flags(prepared, "clip_cov_dropped", x)
    plain, clipped = clipped_surrogate(x, *clip_range(config))
    losses = torch.maximum(plain, clipped).masked_fill(dropped, 0)
    metrics = {"actor/pg_clipfrac": x.mean((clipped > plain) | dropped), "actor/cov_share": x.mean(dropped)}
    return _finish(losses, x, loss_agg_mode, config, rollout_is_weights, metrics)


@register_policy_loss("kl_cov", prepare=kl_cov_choice)
@in_blocks(prepare=kl_cov_choice)
def kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    prepared: Mapping[str, Tensor] | None = None,
    **_: Any,
) -> Result:
    """Unclipped policy gradient with a KL term on the tokens of highest covariance."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask, clamp=20)
    chosen = _prepared_flags(prepared, "kl_cov_chosen", x)
    coef = loss_setting(config, "ppo_kl_coef", 1.0)
    losses = -x.advantages * x.ratio + coef * (x.log_prob - x.old).abs() * chosen
    return _finish(losses, x, loss_agg_mode, config, rollout_is_weights, {"actor/cov_share": x.mean(chosen)})


@register_policy_loss("geo_mean")
@in_blocks()
def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """GMPO: the geometric mean of a sequence's ratios, each token's log-ratio bounded on the side its advantage
    pushes to. The sequence's loss stands on each of its tokens, so every aggregation mode applies to it;
    `seq-mean-token-mean` is the paper's mean over sequences."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    low, high = clip_range(config)
    bounded = torch.where(x.advantages >= 0, x.delta.clamp(max=high), x.delta.clamp(min=-low))
    ratio = sequence_mean(bounded, x.mask).exp()
    losses = (-sequence_mean(x.advantages, x.mask) * ratio).unsqueeze(-1).expand_as(x.delta)
    metrics = {"actor/pg_clipfrac": x.mean(bounded != x.delta)}
    return _finish(losses, x, loss_agg_mode, config, rollout_is_weights, metrics)


def _within_divergence(
    x: Inputs, divergence_of: str, loss_agg_mode: str, config: Any, weights: Tensor | None
) -> Result:
    """-A * sg(min(r, c)) * logp where the policy has not yet moved too far in the direction A pushes it."""
    low, high = clip_range(config)
    bound = loss_setting(config, "clip_ratio_c", 3.0, positive=True)
    with torch.no_grad():
        new, old = x.log_prob.exp(), x.old.exp()
        if divergence_of == "tv":
            divergence = (new - old).abs()
        else:
            rest_old, rest_new = (1 - old).clamp(min=1e-8), (1 - new).clamp(min=1e-8)
            divergence = old * (x.old - x.log_prob) + (1 - old) * (rest_old.log() - rest_new.log())
        too_far = torch.where(
            x.advantages > 0, (new > old) & (divergence > high), (new < old) & (divergence > low)
        )
        ratio = x.ratio.clamp(max=bound)
    losses = (-x.advantages * ratio * x.log_prob).masked_fill(too_far, 0)
    return _finish(losses, x, loss_agg_mode, config, weights, {"actor/pg_clipfrac": x.mean(too_far)})


@register_policy_loss("dppo_tv")
@in_blocks()
def dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """A trust region in total variation: clip_ratio_low/high bound how far the token's probability itself moves."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    return _within_divergence(x, "tv", loss_agg_mode, config, rollout_is_weights)


@register_policy_loss("dppo_kl")
@in_blocks()
def dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """The same in binary KL: between "this token" and "any other" under the old and the new policy."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    return _within_divergence(x, "kl", loss_agg_mode, config, rollout_is_weights)


@register_policy_loss("dro")
@in_blocks()
def dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> Result:
    """Policy gradient with a quadratic pull towards the behaviour policy."""
    x = Inputs.of(old_log_prob, log_prob, advantages, response_mask)
    beta = loss_setting(config, "beta", 0.1, positive=True)
    losses = -(x.log_prob * x.advantages - beta / 2 * x.delta.square())
    metrics = {"actor/dro_penalty": masked_mean(beta / 2 * x.delta.square(), x.mask)}
    return _finish(losses, x, loss_agg_mode, config, rollout_is_weights, metrics)
