"""Preference losses: of pairs (DPO and its relatives) and of single answers (KTO).

All are functions of one number per answer, the sum of its log-probabilities. That makes them additive: `row_weights`
gives d loss / d sum for every answer, and a loss of `weight * sum of log-probs` has the same gradient, however answers
are spread over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verl.algorithms.aggregation import Tensor, torch
from verl.config.methods import PREFERENCE_LOSS, Method, find_method, register_preference_loss
from verl.config.schema import PolicyLossConfig, PreferenceAlgorithmConfig


@dataclass(frozen=True)
class Answers:
    """One number per answer, all [P]: of the chosen answers, or of the rejected ones."""

    log_prob: Tensor
    """Sum over the answer's tokens, under the policy."""
    reference: Tensor
    """The same under the reference policy; 0 for losses without one."""
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        """log pi / ref of the whole answer."""
        return self.log_prob - self.reference

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a token."""
        return self.log_prob / self.tokens


PairSettings = PreferenceAlgorithmConfig | PolicyLossConfig
"""A section with the numbers of the losses; each loss reads those its formula names."""


@dataclass(frozen=True)
class PairTerms:
    """Of each pair, all [P]; the loss keeps its gradient."""

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    rounding: Tensor
    """How large a margin rounding alone can make."""

    @property
    def margin(self) -> Tensor:
        return self.chosen_reward - self.rejected_reward

    @property
    def accuracy(self) -> Tensor:
        return share_right(self.margin, self.rounding)


def share_right(margin: Tensor, rounding: Tensor | float = 0.0) -> Tensor:
    """1 where the margin is above 0, 0 where it is below, 1/2 where it is no larger than `rounding`: a tie, as between
    a policy and a reference that are still the same."""
    return torch.where(margin.abs() <= rounding, 0.5, (margin > 0).to(margin))


def rounding_of(log_prob: Tensor) -> Tensor:
    """Of a sum (or mean) of log-probabilities, which are computed in float32."""
    return log_prob.detach().abs() * torch.finfo(torch.float32).eps


_REFERENCE = ("ref_log_prob",)


def _log_sigmoid(z: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(z)


def _smoothed(z: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(z), with the share `smoothing` of the labels taken as wrong."""
    return -(1 - smoothing) * _log_sigmoid(z) - smoothing * _log_sigmoid(-z)


@register_preference_loss("dpo", needs=_REFERENCE, reads=("label_smoothing",))
def dpo(chosen: Answers, rejected: Answers, settings: PairSettings) -> Tensor:
    """-log sigmoid(beta (log-ratio of the chosen - of the rejected)); with label smoothing the conservative form."""
    return _smoothed(settings.beta * (chosen.ratio - rejected.ratio), settings.label_smoothing)


@register_preference_loss("ipo", needs=_REFERENCE)
def ipo(chosen: Answers, rejected: Answers, settings: PairSettings) -> Tensor:
    """(difference of the mean log-ratios per token - 1 / (2 beta))^2."""
    difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    return (difference - 1 / (2 * settings.beta)).square()


@register_preference_loss("hinge", needs=_REFERENCE)
def hinge(chosen: Answers, rejected: Answers, settings: PairSettings) -> Tensor:
    """max(0, 1 - beta (difference of the log-ratios))."""
    return torch.relu(1 - settings.beta * (chosen.ratio - rejected.ratio))


@register_preference_loss("robust", needs=_REFERENCE, reads=("label_smoothing",))
def robust(chosen: Answers, rejected: Answers, settings: PairSettings) -> Tensor:
    """The same, unbiased where the share `label_smoothing` of the labels is flipped."""
    z, smoothing = settings.beta * (chosen.ratio - rejected.ratio), settings.label_smoothing
    return (-(1 - smoothing) * _log_sigmoid(z) + smoothing * _log_sigmoid(-z)) / (1 - 2 * smoothing)


@register_preference_loss("simpo", reads=("label_smoothing", "simpo_gamma"))
def simpo(chosen: Answers, rejected: Answers, settings: PreferenceAlgorithmConfig) -> Tensor:
    """-log sigmoid(beta (difference of the mean log-probs per token) - gamma); no reference."""
    z = settings.beta * (chosen.mean - rejected.mean) - settings.simpo_gamma
    return _smoothed(z, settings.label_smoothing)


@register_preference_loss("orpo")
def orpo(chosen: Answers, rejected: Answers, settings: PairSettings) -> Tensor:
    """Minus the chosen answer's mean log-probability, minus beta log sigmoid(log of the odds ratio); no reference."""
    odds = chosen.mean - _log1mexp(chosen.mean) - (rejected.mean - _log1mexp(rejected.mean))
    return -chosen.mean - settings.beta * _log_sigmoid(odds)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0; an answer of probability 1 has no finite odds, so x stays a little below 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453
    # Each branch gets inputs it is finite for: a NaN of the other would come back through the gradient.
    first = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, first, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def preference_loss(name: str) -> Method:
    """The loss `algorithm.loss` names."""
    method = find_method(PREFERENCE_LOSS, name)
    assert method is not None, name
    return method


def implied_rewards(method: Method, answers: Answers, settings: PairSettings) -> Tensor:
    """Beta times the log-ratio to the reference, of losses without one beta times the mean log-probability."""
    return settings.beta * (answers.ratio if method.needs else answers.mean).detach()


def pair_terms(name: str, chosen: Answers, rejected: Answers, settings: PairSettings) -> PairTerms:
    """The loss of each pair, and the rewards it implies."""
    method = preference_loss(name)
    loss, free = method.function(chosen, rejected, settings), not method.needs
    both = (chosen, rejected)
    rewards = [implied_rewards(method, each, settings) for each in both]
    rounding = [settings.beta * rounding_of(each.mean if free else each.log_prob) for each in both]
    return PairTerms(loss, rewards[0], rewards[1], rounding[0] + rounding[1])


@register_preference_loss(
    "kto",
    needs=_REFERENCE,
    reads=("desirable_weight", "undesirable_weight", "completion_key", "label_key"),
    compares_responses=False,
)
def kto_loss(
    answers: Answers, desirable: Tensor, kl: Tensor | float, settings: PreferenceAlgorithmConfig
) -> Tensor:
    """Of each answer: weight (1 - sigmoid(beta (log-ratio - kl))), mirrored for undesirable ones. `kl` [] is the
    batch's estimate of the KL to the reference, from answers to other prompts (`kto_kl`)."""
    z = settings.beta * (answers.ratio - kl)
    flags = desirable.bool()
    weight = torch.full_like(z, settings.undesirable_weight).masked_fill(flags, settings.desirable_weight)
    return weight * torch.sigmoid(torch.where(flags, -z, z))


def kto_kl(ratios: Tensor) -> Tensor:
    """From the log-ratios [K] of answers to the prompts of others: their mean, at least 0, without gradient."""
    return ratios.detach().mean().clamp(min=0)


def row_weights(sums: Sequence[Tensor], loss: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`loss(*sums)` [P] of sums of log-probs, and d(its sum) / d(each of them): the weights of the additive form."""
    leaves = [each.detach().requires_grad_(True) for each in sums]
    with torch.enable_grad():
        values = loss(*leaves)
        gradients = torch.autograd.grad(values.sum(), leaves)
    return values.detach(), list(gradients)


def pair_weights(
    name: str, chosen: Answers, rejected: Answers, settings: PairSettings
) -> tuple[PairTerms, Tensor, Tensor]:
    """The terms of each pair without gradient, and d loss / d log_prob of its chosen and of its rejected answer."""

    def loss(first: Tensor, second: Tensor) -> Tensor:
        sides = (replace(chosen, log_prob=first), replace(rejected, log_prob=second))
        return preference_loss(name).function(*sides, settings)

    _, (up, down) = row_weights([chosen.log_prob, rejected.log_prob], loss)
    with torch.no_grad():
        return pair_terms(name, chosen, rejected, settings), up, down


def additive_loss(log_probs: Tensor, mask: Tensor, weight: Tensor, value: Tensor) -> Tensor:
    """A micro-batch's share: its value is the sum of `value` [B], its gradient that of sum(weight * log-probs)."""
    sums = torch.where(mask.bool(), log_probs, 0.0).sum(-1)
    weight, value = weight.to(sums), value.to(sums)
    return (weight * (sums - sums.detach())).sum() + value.sum()
