"""Policy losses (`actor_rollout_ref.actor.policy_loss.loss_mode`) and the critic's loss.

Each policy loss here maps `LossInputs` to token losses [B, T] and metrics (means over the policy tokens); masking,
rollout-correction weights and aggregation are the same for all (`_policy_loss`). Values at masked positions
change neither loss nor gradient. With the mini-batch's counts in `config.global_batch_info`, the shares of
micro-batches and ranks add up to the loss of the mini-batch; losses that compare tokens across it (clip_cov, kl_cov)
choose them in a `prepare` step over all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verl.algorithms.aggregation import Tensor, agg_loss, as_bool, keep, masked_mean, sequence_mean, torch
from verl.config.methods import Prepare, register_correction, register_policy_loss
from verl.config.schema import ActorConfig
from verl.errors import ConfigError

__all__ = ["compute_value_loss"]

SEQUENCE_MODE = "seq-mean-token-mean"
_DEFAULTS = ActorConfig()
_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


@dataclass
class LossInputs:
    """One micro-batch. Tensors are [B, T] and zero where the mask is 0 before any arithmetic is done with them: a NaN
    there would come back through the gradient of exp."""

    old: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    config: Any
    delta: Tensor
    """logp - old, clamped where the loss asks for it."""
    prepared: Mapping[str, Tensor] | None = None
    kl: Tensor | None = None
    """To a teacher, where there is one."""

    @classmethod
    def of(
        cls,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        config: Any,
        clamp: float | None = None,
        prepared: Mapping[str, Tensor] | None = None,
        kl: Tensor | None = None,
    ) -> LossInputs:
        mask = as_bool(response_mask)
        old, new = keep(old_log_prob, mask).detach(), keep(log_prob, mask)
        delta = new - old if clamp is None else (new - old).clamp(-clamp, clamp)
        kl = None if kl is None else keep(kl, mask)
        return cls(old, new, keep(advantages, mask).detach(), mask, config, delta, prepared, kl)

    @cached_property
    def ratio(self) -> Tensor:
        return self.delta.exp()

    def mean(self, values: Tensor) -> Tensor:
        """Over policy tokens; takes flags as well as numbers."""
        if values.dtype == torch.bool:
            return (values & self.mask).sum() / (self.mask.sum() + 1e-8)
        return masked_mean(values, self.mask)

    def setting(self, name: str, above: float | None = None) -> Any:
        """Of `config.policy_loss`, else of `config`, else the schema's default."""
        sections = (getattr(self.config, "policy_loss", None), self.config, _DEFAULTS.policy_loss, _DEFAULTS)
        found = (getattr(section, name, None) for section in sections)
        value: Any = next((value for value in found if value is not None), None)
        if above is not None and value <= above:
            key = f"policy_loss.{name}" if hasattr(_DEFAULTS.policy_loss, name) else name
            raise ConfigError(f"actor_rollout_ref.actor.{key}={value} must be above {above:g}")
        return value

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high), each falling back to clip_ratio."""
        low, high = (self.setting(f"clip_ratio_{side}") for side in ("low", "high"))
        both = self.setting("clip_ratio")
        return both if low is None else low, both if high is None else high

    def surrogates(self, ratio: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(-A r, -A clip(r, 1 - low, 1 + high)); PPO takes the larger one."""
        ratio = self.ratio if ratio is None else ratio
        low, high = self.clip_range
        return -self.advantages * ratio, -self.advantages * ratio.clamp(1 - low, 1 + high)

    def chosen(self, name: str) -> Tensor:
        """The flags [B, T] the loss's prepare hook gave under `name`."""
        if self.prepared is None or name not in self.prepared:
            raise ConfigError(
                f"the loss needs {name!r} of its prepare hook (get_policy_loss_prepare); "
                f"it got {', '.join(self.prepared or ()) or 'nothing'}"
            )
        return self.prepared[name].to(self.mask.device, torch.bool) & self.mask


TokenLoss = Callable[[LossInputs], "tuple[Tensor, dict[str, Tensor]]"]


def _policy_loss(
    name: str,
    *,
    clamp: float | None = None,
    mode: str | None = None,
    prepare: Prepare | None = None,
    reads: tuple[str, ...] = (),
    **declared: Any,
) -> Callable[[TokenLoss], TokenLoss]:
    """Register a loss over `LossInputs` with the keyword signature of registered losses. `clamp` bounds logp - old;
    `mode` is the aggregation where it is part of the method; `declared`: as of `register_policy_loss`."""
    reads = reads if mode else (*reads, "loss_agg_mode")

    def decorate(token_loss: TokenLoss) -> TokenLoss:
        @functools.wraps(token_loss)
        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = "token-mean",
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
            prepared: Mapping[str, Tensor] | None = None,
            kl: Tensor | None = None,
            **_: Any,
        ) -> tuple[Tensor, dict[str, Any]]:
            if prepare is not None and prepared is None:
                prepared = prepare(old_log_prob, log_prob, advantages, response_mask, config)
            x = LossInputs.of(old_log_prob, log_prob, advantages, response_mask, config, clamp, prepared, kl)
            losses, metrics = token_loss(x)
            if rollout_is_weights is not None:
                losses = losses * keep(rollout_is_weights, x.mask).detach()
            counts = getattr(config, "global_batch_info", None) or {}
            value = agg_loss(losses, x.mask, mode or loss_agg_mode, **counts)
            metrics = metrics | {"actor/ppo_kl": x.mean(-x.delta)}
            return value, {key: metric.detach() for key, metric in metrics.items()}

        del loss.__wrapped__  # type: ignore[attr-defined]  # its signature is the one above
        register_policy_loss(name, prepare, reads=reads, **declared)(loss)
        return token_loss

    return decorate


@_policy_loss("vanilla", clamp=20, reads=(*_CLIP, "clip_ratio_c"), skips_zero_advantage=True)
def vanilla(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO with separate clip ranges below and above 1 and a bound on the loss of negative advantages (dual clip)."""
    bound = x.setting("clip_ratio_c", above=1)
    plain, clipped = x.surrogates()
    pessimistic = torch.maximum(plain, clipped)
    ceiling = -x.advantages * bound
    negative = x.advantages < 0
    metrics = {
        "actor/pg_clipfrac": x.mean(clipped > plain),
        "actor/pg_clipfrac_lower": x.mean(negative & (pessimistic > ceiling)),
    }
    return torch.where(negative, torch.minimum(pessimistic, ceiling), pessimistic), metrics


@_policy_loss("gspo", mode=SEQUENCE_MODE, reads=_CLIP, skips_zero_advantage=True)
def gspo(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO on the ratio of whole sequences (geometric mean over tokens); the gradient still reaches every token."""
    log_ratio = x.log_prob - x.log_prob.detach() + sequence_mean(x.delta, x.mask).detach().unsqueeze(-1)
    plain, clipped = x.surrogates(log_ratio.clamp(max=10).exp())
    return torch.maximum(plain, clipped), {"actor/pg_clipfrac": x.mean(clipped > plain)}


@_policy_loss("sapo", clamp=20, mode=SEQUENCE_MODE, reads=("tau_pos", "tau_neg"), skips_zero_advantage=True)
def sapo(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A smooth gate instead of a clip: its slope is 1 at ratio 1 and fades on both sides."""
    tau_pos = x.setting("tau_pos", above=0)
    tau_neg = x.setting("tau_neg", above=0)
    tau = torch.where(x.advantages > 0, tau_pos, tau_neg).to(x.ratio.dtype)
    return -x.advantages * torch.sigmoid(tau * (x.ratio - 1)) * (4 / tau), {}


@_policy_loss("cispo", reads=_CLIP, skips_zero_advantage=True)
def cispo(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with clipped importance weights: no token loses its gradient."""
    low, high = x.clip_range
    ratio = x.ratio.detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -clipped * x.advantages * x.log_prob, {"actor/pg_clipfrac": x.mean(ratio != clipped)}


@_policy_loss("gpg", skips_zero_advantage=True)
def gpg(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain policy gradient."""
    return -x.log_prob * x.advantages, {}


def _token_covariance(x: LossInputs) -> Tensor:
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
    """`clip_cov_dropped` [B, T]: the tokens that get loss 0. Drawn on the CPU, so that all devices choose the same;
    without a generator, from one seeded with `config.policy_loss.seed`."""
    x = LossInputs.of(old_log_prob, log_prob, advantages, response_mask, config, clamp=20)
    plain, clipped = x.surrogates()
    covariance = _token_covariance(x)
    inside = (covariance > x.setting("clip_cov_lb")) & (covariance < x.setting("clip_cov_ub"))
    candidates = (x.mask & (clipped <= plain) & inside).flatten().nonzero().squeeze(-1)
    wanted = max(int(x.setting("clip_cov_ratio") * int(x.mask.sum())), 1)
    if generator is None:
        generator = torch.Generator().manual_seed(int(x.setting("seed")))
    shuffled = torch.randperm(len(candidates), generator=generator, device=generator.device)
    dropped = torch.zeros(x.mask.numel(), dtype=torch.bool, device=x.mask.device)
    dropped[candidates[shuffled[:wanted].to(candidates.device)]] = True
    return {"clip_cov_dropped": dropped.view_as(x.mask)}


@_policy_loss(
    "clip_cov",
    clamp=20,
    prepare=clip_cov_choice,
    reads=(*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "seed"),
    skips_zero_advantage=True,
)
def clip_cov(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO without a few randomly chosen tokens among those whose log-probability and advantage move together, the
    ones that cost entropy."""
    dropped = x.chosen("clip_cov_dropped")
    plain, clipped = x.surrogates()
    metrics = {"actor/pg_clipfrac": x.mean((clipped > plain) | dropped), "actor/cov_share": x.mean(dropped)}
    return torch.maximum(plain, clipped).masked_fill(dropped, 0), metrics


def kl_cov_choice(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """`kl_cov_chosen` [B, T]: the tokens that get the KL term. Nothing random in it; ties go to the earlier one."""
    x = LossInputs.of(old_log_prob, log_prob, advantages, response_mask, config)
    tokens = int(x.mask.sum())
    wanted = min(max(1, int(tokens * x.setting("kl_cov_ratio"))), tokens)
    covariance = _token_covariance(x).masked_fill(~x.mask, -torch.inf).flatten()
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[torch.argsort(covariance, descending=True, stable=True)[:wanted]] = True
    return {"kl_cov_chosen": chosen.view_as(x.mask) & x.mask}


@_policy_loss("kl_cov", clamp=20, prepare=kl_cov_choice, reads=("kl_cov_ratio", "ppo_kl_coef"))
def kl_cov(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Unclipped policy gradient with a KL term on the tokens of highest covariance."""
    chosen = x.chosen("kl_cov_chosen")
    losses = -x.advantages * x.ratio + x.setting("ppo_kl_coef") * (x.log_prob - x.old).abs() * chosen
    return losses, {"actor/cov_share": x.mean(chosen)}


@_policy_loss("geo_mean", reads=_CLIP, skips_zero_advantage=True)
def geo_mean(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO: the geometric mean of a sequence's ratios, each token's log-ratio bounded on the side its advantage
    pushes to. The sequence's loss is repeated on each of its tokens, so every aggregation mode applies to it;
    `seq-mean-token-mean` is the paper's mean over sequences."""
    low, high = x.clip_range
    bounded = torch.where(x.advantages >= 0, x.delta.clamp(max=high), x.delta.clamp(min=-low))
    ratio = sequence_mean(bounded, x.mask).exp()
    losses = (-sequence_mean(x.advantages, x.mask) * ratio).unsqueeze(-1).expand_as(x.delta)
    return losses, {"actor/pg_clipfrac": x.mean(bounded != x.delta)}


def _within_trust_region(
    x: LossInputs, divergence: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A * sg(min(r, c)) * logp where the policy has not yet moved too far in the direction A pushes it.
    `divergence` is of the token's new and old probability."""
    low, high = x.clip_range
    bound = x.setting("clip_ratio_c", above=0)
    with torch.no_grad():
        new, old = x.log_prob.exp(), x.old.exp()
        moved = divergence(new, old)
        too_far = torch.where(x.advantages > 0, (new > old) & (moved > high), (new < old) & (moved > low))
        ratio = x.ratio.clamp(max=bound)
    losses = (-x.advantages * ratio * x.log_prob).masked_fill(too_far, 0)
    return losses, {"actor/pg_clipfrac": x.mean(too_far)}


@_policy_loss("dppo_tv", reads=(*_CLIP, "clip_ratio_c"), skips_zero_advantage=True)
def dppo_tv(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region in total variation: clip_ratio_low/high bound how far the token's probability itself moves."""
    return _within_trust_region(x, lambda new, old: (new - old).abs())


@_policy_loss("dppo_kl", reads=(*_CLIP, "clip_ratio_c"), skips_zero_advantage=True)
def dppo_kl(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The same in binary KL: between "this token" and "any other" under the old and the new policy."""

    def binary_kl(new: Tensor, old: Tensor) -> Tensor:
        rest = (1 - old).clamp(min=1e-8).log() - (1 - new).clamp(min=1e-8).log()
        return old * (x.old - x.log_prob) + (1 - old) * rest

    return _within_trust_region(x, binary_kl)


@_policy_loss("dro", reads=("beta",))
def dro(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a quadratic pull towards the behaviour policy."""
    penalty = x.setting("beta", above=0) / 2 * x.delta.square()
    return penalty - x.log_prob * x.advantages, {"actor/dro_penalty": x.mean(penalty)}


_OF_TEACHER = ("teacher_hidden", "teacher_tokens", "teacher_log_probs")
"""Which of them: teacher.top_k."""


@register_correction("actor_rollout_ref.teacher.coef", needs=_OF_TEACHER)
@_policy_loss("distillation", needs=_OF_TEACHER, reads_advantages=False)
def distillation(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL between the policy and a teacher at every token the policy produced; rewards and advantages are unused."""
    if x.kl is None:
        raise ConfigError(
            "policy_loss.loss_mode=distillation needs a teacher: set actor_rollout_ref.teacher.path, or source"
        )
    return x.kl, {"actor/distillation_kl": x.mean(x.kl)}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    **counts: Any,
) -> tuple[Tensor, Tensor]:
    """0.5 * max((v - R)^2, (clip(v, V - eps, V + eps) - R)^2), aggregated, and the share of tokens where the
    clipped term was the larger one. V are the values the advantages were made from; `counts` as in `agg_loss`."""
    vpreds, returns, values = (keep(x, response_mask) for x in (vpreds, returns, values))
    clipped = torch.maximum(torch.minimum(vpreds, values + cliprange_value), values - cliprange_value)
    plain_loss, clipped_loss = (vpreds - returns).square(), (clipped - returns).square()
    loss = agg_loss(0.5 * torch.maximum(plain_loss, clipped_loss), response_mask, loss_agg_mode, **counts)
    return loss, masked_mean((clipped_loss > plain_loss).to(vpreds.dtype), response_mask).detach()
