"""Rollout correction: importance weights and rejection for the gap between rollout engine and trainer.

With l = old - roll (clamped to +-20) on policy tokens. Weights carry no gradient and are zero off the mask; what is
rejected leaves the returned mask, and with it every loss denominator counted from that.
"""

from __future__ import annotations

import math
from typing import Any

from verl.algorithms.aggregation import Tensor, as_bool, keep, masked_mean, sequence_mean, torch
from verl.config.methods import register_correction
from verl.config.schema import PPOConfig
from verl.config.sections.algorithm import Bounds, rejection_rules
from verl.errors import ConfigError

SECTION = "algorithm.rollout_correction"
LOG_BOUND = 20.0


def _kept_by(rule: str, bounds: Bounds, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B, T] flags of one rule.

    k1 bounds the ratio exp(l), of a token or of the sequence (its product, its geometric mean, each of its
    tokens); one number c means from 1/c to c. k2 = l^2 / 2 and k3 = exp(l) - l - 1 are bounded as they are;
    one number is the upper bound."""
    level, kind = rule.rsplit("_", 1)
    if kind == "k1":
        statistic = log_ratio
        low = (
            math.log(bounds.low)
            if bounds.low
            else (-math.inf if bounds.low == 0 else -abs(math.log(bounds.high)))
        )
        high = math.log(bounds.high) if bounds.low is not None else abs(math.log(bounds.high))
    else:
        statistic = log_ratio.square() / 2 if kind == "k2" else log_ratio.exp() - log_ratio - 1
        low, high = (0.0 if bounds.low is None else bounds.low), bounds.high
    if level == "seq_sum":
        statistic = keep(statistic, mask).sum(-1, keepdim=True)
    elif level == "seq_mean":
        statistic = sequence_mean(statistic, mask).unsqueeze(-1)
    kept = (statistic >= low) & (statistic <= high)
    if level == "seq_max":
        kept = (kept | ~mask).all(-1, keepdim=True)
    return kept.expand_as(mask)


def _bounded_weights(config: Any, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(exp(l) of each token, or of its sequence, within the bounds; flags of those that were outside), [B, T] each."""
    level = config.rollout_is
    if level not in ("token", "sequence"):
        raise ConfigError(f"{SECTION}.rollout_is={level!r} is unknown; allowed: token, sequence")
    bounds = Bounds.parse(config.rollout_is_threshold, "is")
    exponent = log_ratio
    if level == "sequence":
        exponent = (
            keep(log_ratio, mask).sum(-1, keepdim=True).clamp(-LOG_BOUND, LOG_BOUND).expand_as(log_ratio)
        )
    raw = exponent.exp()
    if bounds.low is None:
        return raw.clamp(max=bounds.high), raw > bounds.high
    outside = (raw < bounds.low) | (raw > bounds.high)
    return raw.masked_fill(outside, 0), outside


def _counted_once(config: Any, remaining: Tensor) -> Tensor:
    """Flags [B, T]: a sequence's weight counts once in means, whatever its length."""
    return remaining & (remaining.cumsum(-1) == 1) if config.rollout_is == "sequence" else remaining


def _importance_weights(
    config: Any, log_ratio: Tensor, mask: Tensor, remaining: Tensor
) -> tuple[Tensor, dict[str, float]]:
    weights, outside = _bounded_weights(config, log_ratio, mask)
    metrics = {"rollout_corr/rollout_is_bounded_share": _mean(outside.to(weights.dtype), mask)}
    first = _counted_once(config, remaining)
    if getattr(config, "rollout_is_batch_normalize", False):
        mean = masked_mean(weights, first)
        weights = torch.where(mean > 0, weights / mean, weights)
    values = weights[first]
    if len(values):
        metrics |= {
            "rollout_corr/rollout_is_mean": float(values.mean()),
            "rollout_corr/rollout_is_std": float(values.std()) if len(values) > 1 else 0.0,
            "rollout_corr/rollout_is_min": float(values.min()),
            "rollout_corr/rollout_is_max": float(values.max()),
            "rollout_corr/eff_sample_size": _effective_sample_size(values),
        }
    return keep(weights, remaining), metrics


def _effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weigh the same, 1/n when one weighs everything."""
    wide = weights.to(torch.float64)
    total = wide.square().sum()
    return float(wide.sum().square() / (len(weights) * total)) if float(total) > 0 else 0.0


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(masked_mean(values, mask))


def takes_rollout_log_probs(config: PPOConfig) -> bool:
    """Whether the engine's log-probs are the old ones, without a pass for these."""
    return config.algorithm.rollout_correction.bypass_mode or config.trainer.exact


def corrects_rollout(config: PPOConfig) -> bool:
    """Before the update. In bypass mode each update weighs its tokens itself (`bypass_weights`)."""
    correction = config.algorithm.rollout_correction
    return not correction.bypass_mode and bool(correction.rollout_is or correction.rollout_rs)


@register_correction(SECTION, corrects_rollout, needs=("old_log_probs", "rollout_log_probs"))
def compute_rollout_correction(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: Any
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(weights [B, T] or None, the mask without what was rejected, metrics), by `algorithm.rollout_correction`.

    The mask keeps its dtype. Weights are truncated from above by one threshold and zeroed outside "lo_hi"; the
    optional normalisation to mean 1 is over the tokens (or sequences) that remain."""
    mask = as_bool(response_mask)
    with torch.no_grad():
        old, roll = keep(old_log_prob, mask), keep(rollout_log_prob, mask)
        log_ratio = (old - roll).clamp(-LOG_BOUND, LOG_BOUND)
        metrics = offpolicy_metrics(old, roll, mask) | rollout_probs_diff_metrics(old, roll, mask)
        remaining = mask
        rules = rejection_rules(config)
        for rule, bounds in rules:
            kept = _kept_by(rule, bounds, log_ratio, mask)
            metrics[f"rollout_corr/rejected_by_{rule}"] = _mean((~kept).to(old.dtype), mask)
            remaining = remaining & kept
        if rules:
            metrics["rollout_corr/rejected_tokens"] = _mean((~remaining).to(old.dtype), mask)
            gone = mask.any(-1) & ~remaining.any(-1)
            metrics["rollout_corr/rejected_sequences"] = _mean(gone.to(old.dtype), mask.any(-1))
        weights = None
        if getattr(config, "rollout_is", None):
            weights, weight_metrics = _importance_weights(config, log_ratio, mask, remaining)
            metrics |= weight_metrics
        elif bool(mask.any()):
            metrics["rollout_corr/eff_sample_size"] = _effective_sample_size(log_ratio[mask].exp())
    return weights, remaining.to(response_mask.dtype), metrics


def bypass_weights(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: Any
) -> tuple[Tensor, Tensor]:
    """In bypass mode, by the policy that an update begins with: (weights [B, T] of the token losses, flags of what is
    not rejected). A rejected token weighs 0 and stays in the denominators, which are known before. The weights are 1
    where `loss_type` is ppo_clip, whose own ratio is taken to the rollout policy, or `rollout_is` is not set."""
    mask = as_bool(response_mask)
    with torch.no_grad():
        log_ratio = keep(log_prob, mask) - keep(rollout_log_prob, mask)
        log_ratio = log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
        remaining = mask
        for rule, bounds in rejection_rules(config):
            remaining = remaining & _kept_by(rule, bounds, log_ratio, mask)
        weights = torch.ones_like(log_ratio)
        if config.reinforces and config.rollout_is:
            weights, _ = _bounded_weights(config, log_ratio, mask)
        return keep(weights, remaining), remaining


def mean_bypass_weight(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: Any
) -> float:
    """What `rollout_is_batch_normalize` divides the weights of a whole mini-batch by."""
    weights, remaining = bypass_weights(log_prob, rollout_log_prob, response_mask, config)
    counted = weights[_counted_once(config, remaining)]
    return (float(counted.mean()) if len(counted) else 0.0) or 1.0


def offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """KL(roll || old) by k1 and k3, perplexity of the responses under either side and their ratio (means over
    sequences), and chi-square of tokens and of sequences."""
    mask = as_bool(response_mask)
    if not bool(mask.any()):
        return {}
    old, roll = keep(old_log_prob, mask), keep(rollout_log_prob, mask)
    log_ratio = (old - roll).clamp(-LOG_BOUND, LOG_BOUND)
    rows = mask.any(-1)
    # In float64: the perplexity of an unlikely response is past the range of float32.
    old_mean, roll_mean = sequence_mean(old.double(), mask), sequence_mean(roll.double(), mask)
    sequence = keep(log_ratio, mask).sum(-1).clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "rollout_corr/kl": _mean(-log_ratio, mask),
        "rollout_corr/k3_kl": _mean(log_ratio.exp() - log_ratio - 1, mask),
        "rollout_corr/training_ppl": _mean((-old_mean).exp(), rows),
        "rollout_corr/rollout_ppl": _mean((-roll_mean).exp(), rows),
        "rollout_corr/ppl_ratio": _mean((roll_mean - old_mean).exp(), rows),
        "rollout_corr/chi2_token": _mean((2 * log_ratio).exp(), mask) - 1,
        "rollout_corr/chi2_seq": _mean((2 * sequence).exp(), rows) - 1,
    }


def rollout_probs_diff_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """|exp(old) - exp(roll)| on policy tokens: how well trainer and rollout engine agree on what was sampled."""
    mask = as_bool(response_mask)
    difference = (old_log_prob[mask].exp() - rollout_log_prob[mask].exp()).abs()
    if not len(difference):
        return {}
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std()) if len(difference) > 1 else 0.0,
    }
