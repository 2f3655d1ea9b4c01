"""The responses to each prompt: group numbers, statistics within groups, and which are learned from, with
what reward (dynamic sampling, overlong shaping, PF-PPO resampling).

Rows may be turns of one conversation (`multi_turn.history=split`): the column `session` names the conversation of each
row; its turns stand in order. Joined, a conversation is one row of its policy tokens with a masked position after each
turn; what was computed there is cut back into the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.algorithms.aggregation import Tensor, as_bool, masked_sum, torch
from verl.config.methods import methods_of, register_correction
from verl.config.schema import PPOConfig
from verl.config.sections.algorithm import FILTER_METRICS, PF_PPO_METHODS
from verl.errors import ConfigError, DataError, TrainingHalted


def group_ids(index: Any, device: torch.device | str = "cpu") -> tuple[Tensor, int]:
    """Group numbers 0..G-1 in order of first appearance, [B], and G. `index` is anything with one hashable
    entry per sequence: an object array or list of uids, numbers, a tensor."""
    entries: Sequence[Any] = index.tolist() if hasattr(index, "tolist") else list(index)
    number = {uid: at for at, uid in enumerate(dict.fromkeys(entries))}
    ids = torch.tensor([number[uid] for uid in entries], dtype=torch.int64)
    return ids.to(device), len(number)


@dataclass(frozen=True)
class Groups:
    """The responses to each prompt; every method maps a [B] vector to a [B] vector of its group's statistic, and a
    matrix [B, K] column by column.

    In float64: exact enough that a group of equal rewards gives exact zeros and that the order of additions does not
    show."""

    ids: Tensor
    count: int
    sizes: Tensor
    """[B], float64: members of the group each sequence belongs to."""

    @classmethod
    def of(cls, index: Any, batch_size: int, device: torch.device) -> Groups:
        ids, count = group_ids(index, device)
        if ids.shape[0] != batch_size:
            raise DataError(
                f"the group index has {ids.shape[0]} entries for a batch of {batch_size} sequences"
            )
        sizes = torch.bincount(ids, minlength=count).to(torch.float64)
        return cls(ids, count, sizes[ids] if batch_size else sizes)

    def sum(self, values: Tensor) -> Tensor:
        total = torch.zeros(self.count, *values.shape[1:], dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.ids, values.to(torch.float64))[self.ids]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / _beside(self.sizes, values)

    def others_mean(self, values: Tensor) -> Tensor:
        """The mean over the group's other members; 0 for a group of one."""
        return (self.sum(values) - values) / _beside((self.sizes - 1).clamp(min=1), values)

    def extreme(self, values: Tensor, how: str) -> Tensor:
        """`how`: amax or amin."""
        found = torch.zeros(self.count, *values.shape[1:], dtype=values.dtype, device=values.device)
        ids = _beside(self.ids, values).expand_as(values)
        return found.scatter_reduce_(0, ids, values, how, include_self=False)[self.ids]

    def shifted(self, scores: Tensor) -> Tensor:
        """Scores with the group's least one taken off. What only depends on differences is computed from these:
        equal scores are then exact zeros, and large ones lose no digits."""
        values = scores.to(torch.float64)
        return values - self.extreme(values, "amin")

    def std(self, values: Tensor) -> Tensor:
        """Unbiased; 0 for a group of one."""
        centred = values.to(torch.float64) - self.mean(values)
        return (self.sum(centred.square()) / _beside((self.sizes - 1).clamp(min=1), values)).sqrt()


def _beside(per_row: Tensor, values: Tensor) -> Tensor:
    """[B] in a shape that goes with [B] or [B, K]."""
    return per_row.view(-1, *[1] * (values.dim() - 1))


def sequence_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """s_i: the sum of a sequence's rewards over its policy tokens, [B], float64."""
    return masked_sum(token_level_rewards, response_mask, axis=-1).to(torch.float64)


def scored_groups(token_level_rewards: Tensor, response_mask: Tensor, index: Any) -> tuple[Tensor, Groups]:
    scores = sequence_scores(token_level_rewards, response_mask)
    return scores, Groups.of(index, scores.shape[0], scores.device)


def spread(per_sequence: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A number per sequence [B] onto each of its policy tokens [B, T]."""
    column = per_sequence.to(dtype).unsqueeze(-1)
    flags = response_mask if response_mask.dtype == dtype else as_bool(response_mask)
    return column * flags


def group_metrics(token_level_rewards: Tensor, response_mask: Tensor, index: Any) -> dict[str, float]:
    """How much a group estimator could learn from this batch: groups, those of one, and those whose rewards are
    all equal (groups of one included); both give advantage 0."""
    scores, groups = scored_groups(token_level_rewards, response_mask, index)
    share = 1 / groups.sizes
    constant = groups.extreme(scores, "amax") == groups.extreme(scores, "amin")
    return {
        "training/groups": float(groups.count),
        "training/groups_of_one": float((groups.sizes == 1).sum()),
        "training/groups_constant": float(share[constant].sum().round()),
    }


class Trajectories:
    """The S conversations of a batch of B rows; without a column (None) every row is one."""

    def __init__(self, column: Any | None, rows: int, device: torch.device | str = "cpu") -> None:
        self.ids, self.count = group_ids(range(rows) if column is None else column, device)
        """[B]: the conversation of each row, numbered in order of first appearance."""
        self.order = torch.argsort(self.ids, stable=True)
        """[B]: row numbers, conversation after conversation."""
        self.sizes = torch.bincount(self.ids, minlength=self.count)
        """[S]: rows of each."""
        self.starts = self.sizes.cumsum(0) - self.sizes
        """[S]: where each begins in `order`."""

    @property
    def first(self) -> Tensor:
        """[S]: the first row of each conversation."""
        return self.order[self.starts]

    def rows_of(self, chosen: Tensor) -> Tensor:
        """The row numbers of some conversations, one after the other."""
        sizes = self.sizes[chosen]
        before = sizes.cumsum(0) - sizes
        within = torch.arange(int(sizes.sum())) - before.repeat_interleave(sizes)
        return self.order[self.starts[chosen].repeat_interleave(sizes) + within]

    def sum(self, values: Tensor) -> Tensor:
        """[B] -> [S]."""
        return values.new_zeros(self.count).index_add_(0, self.ids, values)


class JoinedTokens:
    """Moves the policy tokens of a conversation's rows [B, T] into one row [S, W], and back."""

    def __init__(self, trajectories: Trajectories, response_mask: Tensor) -> None:
        self._flags = as_bool(response_mask)
        places = self._flags.sum(-1) + 1  # and the masked one that keeps turns apart
        in_order = places[trajectories.order]
        before = in_order.cumsum(0) - in_order
        offset = torch.empty_like(places)
        offset[trajectories.order] = before - before[trajectories.starts].repeat_interleave(
            trajectories.sizes
        )
        self._row = trajectories.ids.unsqueeze(-1).expand_as(self._flags)[self._flags]
        self._column = (offset.unsqueeze(-1) + self._flags.cumsum(-1) - 1)[self._flags]
        widths = trajectories.sum(places)
        self._shape = (trajectories.count, int(widths.max()) if len(widths) else 0)

    def join(self, values: Tensor) -> Tensor:
        """Zero between turns and behind the last one."""
        joined = values.new_zeros(self._shape)
        joined[self._row, self._column] = values[self._flags]
        return joined

    def cut(self, joined: Tensor) -> Tensor:
        """Zero where the mask of the rows is 0."""
        values = joined.new_zeros(self._flags.shape)
        values[self._flags] = joined[self._row, self._column]
        return values


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
    turns = config.actor_rollout_ref.rollout.multi_turn
    if turns.splits:
        yield (
            f"'algorithm.use_pf_ppo' is True, but actor_rollout_ref.rollout.multi_turn.{turns.splits} makes several "
            f"rows of a response; set it to False, or use {turns.one_row}"
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
