"""Sums and means over the positions a mask keeps, and from a matrix of token losses to one number.

Values at masked positions (NaN and infinities included) change neither value nor gradient of a result. Given the
counts of the whole mini-batch, the sum of the losses of its micro-batches (and the mean over ranks of such sums) is the
loss of the mini-batch, however it was split.

KL between two policies is estimated from the log-probabilities of the tokens one of them took. With x = logp - ref:
`k1` is unbiased but of either sign, `k2` has the right gradient, `k3` is unbiased and never negative. A trailing `+`
keeps an estimator's value and takes the gradient of `k2`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from verl.config.sections.actor import LOSS_AGG_MODES as LOSS_AGG_MODES
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    # Checks of a config, --help and shell completion read what methods declare and must not wait seconds for torch: the
    # modules of methods have it from here, imported when first used.
    Tensor = Any  # in annotations only

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
from collections.abc import Callable
from typing import Any

from verl.config.methods import register_correction

_bound: ContextVar[Mapping[str, Any] | None] = ContextVar("verl_loss_denominators", default=None)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set, exact zeros elsewhere. A product would let NaN through."""
    return values.masked_fill(~as_bool(mask), 0)


def as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    kept = keep(values, mask)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    flags = as_bool(mask).expand_as(values)
    count = flags.sum() if axis is None else flags.sum(dim=axis)
    return masked_sum(values, mask, axis) / (count.to(values.dtype) + 1e-8)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's policy tokens, [B]; 0 for a sequence without any."""
    return keep(values, mask).sum(-1) / as_bool(mask).sum(-1).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance over kept positions."""
    flags = as_bool(mask).expand_as(values)
    count = int(flags.sum())
    if count < 2:
        raise DataError(
            f"a variance needs at least 2 policy tokens in the batch, this one has {count}: responses are empty or "
            "masked out. Raise data.train_batch_size or data.max_response_length, or loosen what masks responses "
            "(overlong filtering, algorithm.rollout_correction.rollout_rs)"
        )
    centred = keep(values - masked_sum(values, flags) / count, flags)
    return centred.square().sum() / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Mean 0 (or the old mean, with `shift_mean=False`) and variance 1 over kept positions; zero elsewhere."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return keep(whitened if shift_mean else whitened + mean, mask)


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
    # By numpy: starting torch's threads takes longer than counting.
    flags = response_mask.detach().cpu().numpy() != 0
    return {"batch_num_tokens": int(flags.sum()), "global_batch_size": int(flags.any(-1).sum())}


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    sequence_num_tokens: Tensor | None = None,
) -> Tensor:
    """This matrix's share of the mini-batch's loss, times `dp_size` (which undoes the averaging over ranks).

    What is None is taken from the matrix at hand: its policy tokens, its sequences with at least one of them,
    its width. `sequence_num_tokens` [B] is for rows that are part of a longer sequence: the policy tokens of all of it.
    """
    bound = _bound.get()
    given = (batch_num_tokens, global_batch_size, loss_scale_factor, sequence_num_tokens)
    if bound is not None and all(value is None for value in given):
        dp_size = bound.get("dp_size", dp_size)
        batch_num_tokens = bound.get("batch_num_tokens")
        global_batch_size = bound.get("global_batch_size")
        loss_scale_factor = bound.get("loss_scale_factor")
        sequence_num_tokens = bound.get("sequence_num_tokens")
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
        tokens = flags.sum(-1) if sequence_num_tokens is None else sequence_num_tokens
        per_sequence = per_sequence / tokens.clamp(min=1)
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
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


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
