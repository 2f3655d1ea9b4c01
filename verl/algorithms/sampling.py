"""Which samples are learned from, and with what reward: dynamic sampling, overlong shaping, PF-PPO resampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl.algorithms.aggregation import Tensor, torch
from verl.algorithms.groups import Groups, sequence_scores
from verl.config.methods import methods_of, register_correction
from verl.config.schema import PPOConfig
from verl.config.sections.algorithm import FILTER_METRICS, PF_PPO_METHODS
from verl.errors import ConfigError, TrainingHalted

_ROUNDING = 1e-9


def group_filter_values(
    metric: str,
    token_level_scores: Tensor,
    token_level_rewards: Tensor | None,
    response_mask: Tensor,
    extra: Mapping[str, Any] | None = None,
) -> Tensor:
    """The value [B] dynamic sampling compares within groups. `acc` and `score` are keys of the reward function's
    result (`extra`); `score` falls back to `seq_reward`, the sum of the scores; `seq_final_reward` is the sum of
    the rewards after the KL was taken off."""
    extra = extra or {}
    if metric not in FILTER_METRICS:
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric!r} is unknown; allowed: {', '.join(FILTER_METRICS)}"
        )
    if metric in extra:
        return torch.as_tensor([float(value) for value in extra[metric]], dtype=torch.float64)
    if metric == "acc":
        raise ConfigError(
            "algorithm.filter_groups.metric=acc needs a reward function that returns a dict with 'acc', not "
            f"{', '.join(extra) or 'only a number'}; or set metric=seq_reward"
        )
    if metric == "seq_final_reward":
        if token_level_rewards is None:
            raise ConfigError("algorithm.filter_groups.metric=seq_final_reward needs token_level_rewards")
        return sequence_scores(token_level_rewards, response_mask)
    return sequence_scores(token_level_scores, response_mask)


def constant_groups(values: Tensor, index: Any) -> Tensor:
    """[B] flags of the sequences whose group has one and the same value throughout (a group of one has)."""
    groups = Groups.of(index, values.shape[0], values.device)
    return groups.extreme(values, "amax") == groups.extreme(values, "amin")


def groups_within(values: Tensor, index: Any, lower: float | None, upper: float | None) -> Tensor:
    """[B] flags of the sequences whose group has a mean from `lower` to `upper`; None is no bound. Accuracies like 0.2
    are no binary fractions: the bounds themselves count as within, up to rounding."""
    mean = Groups.of(index, values.shape[0], values.device).mean(values)
    within = torch.ones_like(mean, dtype=torch.bool)
    if lower is not None:
        within &= mean >= lower - _ROUNDING * max(abs(lower), 1)
    if upper is not None:
        within &= mean <= upper + _ROUNDING * max(abs(upper), 1)
    return within


def dynamic_sampling_failed(
    rounds: int, groups: int, constant: int, wanted: int, outside: int = 0
) -> TrainingHalted:
    """What to raise when `algorithm.filter_groups.max_num_gen_batches` rounds did not fill the batch. `outside`: groups
    that differ, but whose mean is out of bounds."""
    share = constant / max(groups, 1)
    bounded = ""
    if outside:
        bounded = (
            f", and in {outside} ({outside / max(groups, 1):.0%}) their mean was outside "
            "algorithm.filter_groups.accuracy_lower_bound and accuracy_upper_bound"
        )
    return TrainingHalted(
        f"dynamic sampling found {groups - constant - outside} of {wanted} prompts in {rounds} rounds of generation: "
        f"in {constant} of {groups} groups ({share:.0%}) every response had the same value{bounded}. The data is too "
        "easy or too hard for this model, or the reward does not distinguish responses. Raise "
        "algorithm.filter_groups.max_num_gen_batches (0: no limit) or actor_rollout_ref.rollout.n, or set "
        "algorithm.filter_groups.enable=False"
    )


def overlong_penalty(
    response_lengths: Tensor, max_response_length: int, buffer_len: int, penalty_factor: float = 1.0
) -> Tensor:
    """What DAPO adds to the reward [B], never positive: 0 up to the last `buffer_len` tokens of the limit, then
    falling linearly to -penalty_factor at the limit and beyond it."""
    if buffer_len < 1 or buffer_len > max_response_length:
        raise ConfigError(
            f"reward.overlong_buffer.len={buffer_len} must be from 1 to data.max_response_length={max_response_length}"
        )
    exceed = response_lengths.to(torch.float32) - (max_response_length - buffer_len)
    return (-exceed / buffer_len * penalty_factor).clamp(-penalty_factor, 0)


def mask_overlong(response_mask: Tensor, truncated: Any) -> Tensor:
    """The mask without the responses that were cut off at the length limit (`truncated`: a flag each)."""
    flags = torch.as_tensor(truncated, dtype=torch.bool, device=response_mask.device)
    return response_mask.masked_fill(flags.unsqueeze(-1), 0)


def pf_ppo_weights(scores: Tensor, method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """How likely each response [B] is to be drawn, up to a factor. `pow`: |s|^p; `max_min`: only the best and the
    worst of the batch; `max_random`: the best four times as likely as any other."""
    values = scores.to(torch.float64)
    if method == "pow":
        weights = values.abs().pow(weight_pow)
        # All zero: nothing to prefer.
        return weights if bool((weights > 0).any()) else torch.ones_like(weights)
    if not len(values):
        return values
    best = values == values.max()
    if method == "max_min":
        return (best | (values == values.min())).to(torch.float64)
    if method == "max_random":
        return torch.where(best, 4.0, 1.0).to(torch.float64)
    raise ConfigError(
        f"algorithm.pf_ppo.reweight_method={method!r} is unknown; allowed: {', '.join(PF_PPO_METHODS)}"
    )


def _pf_ppo_errors(config: PPOConfig) -> Iterator[str]:
    for method in methods_of(config):
        if method.whole_groups:
            yield (
                f"'algorithm.use_pf_ppo' is True, but {method.setting} compares whole groups of responses; set it to "
                "False"
            )
    if config.actor_rollout_ref.rollout.multi_turn.splits:
        yield (
            "'algorithm.use_pf_ppo' is True, but actor_rollout_ref.rollout.multi_turn.history=split makes several "
            "rows of a response; set it to False, or use history=append if the chat template allows it"
        )


@register_correction("algorithm.use_pf_ppo", check=_pf_ppo_errors)
def pf_ppo_indices(
    scores: Tensor, method: str = "pow", weight_pow: float = 2.0, generator: torch.Generator | None = None
) -> Tensor:
    """B row numbers drawn with replacement by `pf_ppo_weights`: the batch to learn from instead. Drawn on the CPU,
    so that every device gets the same rows; without a generator, from a fresh one with seed 0."""
    weights = pf_ppo_weights(scores, method, weight_pow).cpu()
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    if not len(weights):
        return torch.empty(0, dtype=torch.int64)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
