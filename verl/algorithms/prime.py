"""PRIME: process rewards from an implicit reward model, a language model trained on outcomes alone.

The reward of a token is beta times the log-ratio of the model to its start, q = log pi - log pi_start; the sum over a
response, as a logit, predicts the outcome. Both loss and gradient are sums over rows: they do not depend on how a
mini-batch is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.algorithms.advantages import rewards_to_go
from verl.algorithms.aggregation import as_bool, keep, masked_whiten, sequence_mean
from verl.algorithms.groups import scored_groups, spread
from verl.algorithms.lazy_torch import Tensor, torch
from verl.config.methods import register_adv_est
from verl.config.sections.algorithm import PRIMEConfig

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig


def _prime_errors(config: PPOConfig) -> list[str]:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if not (multi_turn.enable and multi_turn.history == "split"):
        return []
    return [
        "'algorithm.adv_estimator' is prime, but actor_rollout_ref.rollout.multi_turn.history=split makes several rows "
        "of a response, and its reward model judges a response as one row; use history=append if the chat template "
        "allows it, or turn_rloo"
    ]


@register_adv_est("prime", needs=("process_rewards",), reads=(), compares_responses=True, check=_prime_errors)
def prime(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    process_rewards: Tensor,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Leave-one-out advantages of outcome and process, whitened: the score less the mean of the group's other
    responses, plus from each token to the end the process rewards, each less the mean over the others of the mean
    process reward of their tokens. A group of one has nothing to be compared with, and both are 0."""
    coefs = getattr(config, "prime", None) or PRIMEConfig()
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    shifted = groups.shifted(scores)
    returns = spread(
        coefs.outcome_coef * (shifted - groups.others_mean(shifted)), response_mask, torch.float64
    )
    if coefs.process_coef:
        rewards = keep(process_rewards, response_mask).double()
        baseline = groups.others_mean(sequence_mean(rewards, response_mask)).unsqueeze(-1)
        compared = keep(rewards - baseline, as_bool(response_mask) & (groups.sizes > 1).unsqueeze(-1))
        returns = returns + coefs.process_coef * rewards_to_go(compared, response_mask)
    returns = returns.to(token_level_rewards.dtype)
    return masked_whiten(returns, response_mask), returns


def implicit_rewards(log_prob: Tensor, start_log_prob: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """The reward of each token [B, T], zero where the mask is 0."""
    return beta * keep(log_prob - start_log_prob, response_mask)


def outcome_cross_entropy(rewards: Tensor, response_mask: Tensor, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy [B] of the sum of a response's rewards, a logit [B], against its outcome (0 or 1), and that
    logit; 0 for a response without policy tokens."""
    logit = rewards.sum(-1)
    terms = torch.nn.functional.binary_cross_entropy_with_logits(
        logit, outcome.to(logit.dtype), reduction="none"
    )
    return keep(terms, as_bool(response_mask).any(-1)), logit.detach()
