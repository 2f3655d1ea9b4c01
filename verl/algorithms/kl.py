"""KL between two policies from the log-probabilities of the tokens one of them took, and its controllers.

With x = logp - ref: `k1` is unbiased but of either sign, `k2` has the right gradient, `k3` is unbiased and never
negative. A trailing `+` keeps an estimator's value and takes the gradient of `k2`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.algorithms.aggregation import Tensor, keep, masked_mean, torch
from verl.config.methods import register_correction
from verl.errors import ConfigError


def _k1(x: Tensor) -> Tensor:
    return x


def _k2(x: Tensor) -> Tensor:
    return x.square() / 2


def _k3(x: Tensor) -> Tensor:
    d = (-x).clamp(-20, 20)
    # expm1, because exp(d) - 1 loses the digits that make this non-negative near 0.
    return (d.expm1() - d).clamp(-10, 10)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": lambda x: x.abs(),
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_ESTIMATORS = tuple(_ESTIMATORS) + tuple(f"{name}+" for name in _ESTIMATORS)


@register_correction("actor_rollout_ref.actor.use_kl_loss", needs=("ref_log_prob",))
def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The KL estimate of every token, in the shape of `logprob`."""
    estimator = _ESTIMATORS.get(kl_penalty.removesuffix("+"))
    if estimator is None:
        raise ConfigError(
            f"KL estimator {kl_penalty!r} is unknown; allowed: {', '.join(KL_ESTIMATORS)} "
            f"(actor.kl_loss_type in the loss, algorithm.kl_penalty in the reward)"
        )
    x = logprob - ref_logprob
    value = estimator(x)
    if not kl_penalty.endswith("+"):
        return value
    carrier = _k2(x)
    return carrier - carrier.detach() + value.detach()


@register_correction("algorithm.use_kl_in_reward", needs=("old_log_probs", "ref_log_prob"))
def apply_kl_penalty(
    token_level_scores: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kl_penalty_type: str = "kl",
) -> tuple[Tensor, float]:
    """Rewards with the KL taken off token by token, and the mean over sequences of each one's mean KL
    (which an adaptive controller is fed with). Zero where the mask is 0."""
    kl = kl_penalty(keep(log_prob, response_mask), keep(ref_log_prob, response_mask), kl_penalty_type)
    rewards = keep(token_level_scores, response_mask) - kl_coef * kl
    per_sequence = masked_mean(kl, response_mask, axis=-1)
    has_tokens = keep(torch.ones_like(kl), response_mask).sum(-1) > 0
    return keep(rewards, response_mask), float(masked_mean(per_sequence, has_tokens))


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keeps the configured value: a user who resumes with another coefficient wants that one."""


class AdaptiveKLController:
    """coef *= 1 + clip(current / target - 1, +-0.2) * steps / horizon (Ziegler et al. 2019)."""

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        for name, value in (("target_kl", target_kl), ("horizon", horizon)):
            if value <= 0:
                raise ConfigError(f"algorithm.kl_ctrl.{name}={value} must be above 0 for type=adaptive")
        self.value = float(kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """`n_steps` is the number of sequences the KL was measured on."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """The controller of an `algorithm.kl_ctrl` section (type, kl_coef, target_kl, horizon)."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type={kl_ctrl.type!r} is unknown; allowed: fixed, adaptive")
