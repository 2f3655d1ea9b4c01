"""Policy losses that compare the responses to one prompt: online DPO and SPIN on pairs, SPPO on win rates.

Pairs are found in `prepare`, which sees the whole mini-batch. What it returns is one number per row, so that the
responses of a pair need not be in one micro-batch, or on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.algorithms.aggregation import Tensor, agg_loss, as_bool, keep, masked_mean, masked_sum, torch
from verl.algorithms.groups import Trajectories, group_ids
from verl.algorithms.preference import Answers, additive_loss, pair_weights
from verl.config.methods import POLICY_LOSS, register_policy_loss
from verl.config.schema import PolicyLossConfig, PPOConfig
from verl.errors import ConfigError
from verl.observe.metrics import Metric


@dataclass(frozen=True)
class Pairs:
    """P pairs of N responses, and what was compared without result."""

    chosen: Tensor
    """[P]: the number of the better response."""
    rejected: Tensor
    """[P]: of the worse one."""
    share: Tensor
    """[P], float64: what the pair counts; less than 1 where equally good responses share one place."""
    ties: Tensor
    """[N], float64: of each response its part in the comparisons that ended with equal rewards."""
    tied_groups: Tensor
    """[N], float64: 1 on the first response of each group in which no response is better than another."""

    @property
    def count(self) -> float:
        return float(self.share.sum())


def reward_pairs(rewards: Tensor, index: Any, usable: Tensor, how: str) -> Pairs:
    """Of the responses [N] that are `usable`, within groups (`index`, as in `group_ids`). `best_worst`: the best of
    each group against its worst; `all`: every pair with different rewards.

    Responses of equal reward are never a pair. Where several are equally good (or bad), the best (worst) is each of
    them with an equal share: which one comes first in the batch must not matter."""
    rewards = rewards.to(torch.float64)
    ties, tied_groups = torch.zeros_like(rewards), torch.zeros_like(rewards)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _members(index, usable):
        values = rewards[rows]
        better = values.unsqueeze(1) > values.unsqueeze(0)
        if not bool(better.any()):
            tied_groups[rows[0]] = 1
        if how == "best_worst":
            better &= (values == values.max()).unsqueeze(1) & (values == values.min()).unsqueeze(0)
            ties[rows[0]] += float(not bool(better.any()))
        else:
            ties[rows] += ((values.unsqueeze(1) == values.unsqueeze(0)).sum(1) - 1) / 2
        first, second = better.nonzero(as_tuple=True)
        one = torch.ones(len(first), dtype=torch.float64, device=rewards.device)
        found.append((rows[first], rows[second], one / len(first) if how == "best_worst" else one))
    return _joined(found, ties, tied_groups)


def data_pairs(from_data: Tensor, index: Any, usable: Tensor) -> Pairs:
    """The data's answer of each group (`from_data` [N]) against each of the others."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _members(index, usable):
        given, drawn = rows[from_data[rows]], rows[~from_data[rows]]
        pairs = torch.cartesian_prod(given, drawn)
        found.append((pairs[:, 0], pairs[:, 1], torch.ones(len(pairs), dtype=torch.float64)))
    nothing = torch.zeros(len(from_data), dtype=torch.float64, device=from_data.device)
    return _joined(found, nothing, nothing)


def win_rates(rewards: Tensor, index: Any, usable: Tensor) -> Tensor:
    """[N], float64: how probably each response is preferred to another of its group, sigmoid(difference of their
    rewards), averaged over the others; 1/2 where there is none."""
    rewards = rewards.to(torch.float64)
    rates = torch.full_like(rewards, 0.5)
    for rows in _members(index, usable):
        if len(rows) > 1:
            values = rewards[rows]
            wins = torch.sigmoid(values.unsqueeze(1) - values.unsqueeze(0)).sum(1) - 0.5  # not against itself
            rates[rows] = wins / (len(rows) - 1)
    return rates


def _members(index: Any, usable: Tensor) -> list[Tensor]:
    """The usable rows of each group that has some."""
    ids, _ = group_ids(index, usable.device)
    rows = usable.nonzero().squeeze(-1)
    if not len(rows):
        return []
    order = torch.argsort(ids[rows], stable=True)
    sizes = torch.unique_consecutive(ids[rows][order], return_counts=True)[1]
    return list(rows[order].split(sizes.tolist()))


def _joined(found: list[tuple[Tensor, Tensor, Tensor]], ties: Tensor, tied_groups: Tensor) -> Pairs:
    none = torch.empty(0, dtype=torch.long, device=ties.device)
    chosen, rejected, share = (
        torch.cat(parts) for parts in zip(*found, (none, none, none.to(torch.float64)), strict=True)
    )
    return Pairs(chosen, rejected, share, ties, tied_groups)


_METRICS = ("margin", "accuracy", "pairs", "tied_pairs", "tied_groups")


def _settings(config: Any) -> Any:
    return getattr(config, "policy_loss", None) or PolicyLossConfig()


class _Responses:
    """The responses of a mini-batch; one may be several rows, the turns of a conversation (column `session`)."""

    def __init__(self, batch: Any, response_mask: Tensor) -> None:
        self._batch, self._mask = batch, response_mask
        columns = batch.non_tensor_batch
        self._trajectories = Trajectories(columns.get("session"), len(response_mask), response_mask.device)
        self.first = self._trajectories.first
        """[N]: the first row of each."""
        self.index = columns["uid"][self.first.cpu().numpy()]
        self.tokens = self._trajectories.sum(as_bool(response_mask).sum(-1))
        self.usable = self.tokens > 0

    def sum(self, values: Tensor) -> Tensor:
        """[B, T] -> [N], float64, over policy tokens."""
        return self._trajectories.sum(masked_sum(values, self._mask, axis=-1).to(torch.float64))

    @property
    def rewards(self) -> Tensor:
        return self.sum(self._batch.batch["token_level_rewards"])

    def every_row(self, values: Tensor) -> Tensor:
        """[N] -> [B]: the same on all rows of a response."""
        return values[self._trajectories.ids]

    def first_row(self, values: Tensor) -> Tensor:
        """[N] -> [B]: on the first row of a response, so that the sum stays the same."""
        return values.new_zeros(len(self._mask)).index_copy_(0, self.first, values)


def _pair_shares(
    pairs: Pairs, responses: _Responses, log_prob: Tensor, batch: Any, config: Any
) -> dict[str, Tensor]:
    """`weight` [B], d loss / d log-prob of the row's tokens, `value` [B], whose sum is the loss (the mean over pairs),
    and what the sums of the metrics are made of."""
    settings = _settings(config)
    if "ref_log_prob" not in batch.batch:
        raise ConfigError(
            f"policy_loss.loss_mode={settings.loss_mode} needs the log-probs of the reference policy (ref_log_prob)"
        )
    policy, reference = responses.sum(log_prob), responses.sum(batch.batch["ref_log_prob"])
    chosen, rejected = (
        Answers(policy[rows], reference[rows], responses.tokens[rows])
        for rows in (pairs.chosen, pairs.rejected)
    )
    terms, up, down = pair_weights(settings.pair_loss, chosen, rejected, settings)
    share = pairs.share / max(pairs.count, 1.0)

    def on(rows: Tensor, values: Tensor) -> Tensor:
        return torch.zeros_like(policy).index_add_(0, rows, values)

    weight = on(pairs.chosen, share * up) + on(pairs.rejected, share * down)
    single = {
        "value": on(pairs.chosen, share * terms.loss),
        "margin": on(pairs.chosen, share * terms.margin),
        "accuracy": on(pairs.chosen, share * terms.accuracy),
        "pairs": on(pairs.chosen, pairs.share),
        "tied_pairs": pairs.ties,
        "tied_groups": pairs.tied_groups,
    }
    return {
        "weight": responses.every_row(weight),
        **{name: responses.first_row(values) for name, values in single.items()},
    }


def online_dpo_pairs(log_prob: Tensor, response_mask: Tensor, config: Any, batch: Any) -> dict[str, Tensor]:
    """Pairs by reward, within the responses to each prompt."""
    responses = _Responses(batch, response_mask)
    pairs = reward_pairs(responses.rewards, responses.index, responses.usable, _settings(config).pairs)
    return _pair_shares(pairs, responses, log_prob, batch, config)


def spin_pairs(log_prob: Tensor, response_mask: Tensor, config: Any, batch: Any) -> dict[str, Tensor]:
    """The data's answer against each of the policy's own."""
    if "from_data" not in batch.batch:
        raise ConfigError("policy_loss.loss_mode=spin needs rows with the data's answers (column from_data)")
    responses = _Responses(batch, response_mask)
    from_data = batch.batch["from_data"].bool()[responses.first]
    pairs = data_pairs(from_data, responses.index, responses.usable)
    return _pair_shares(pairs, responses, log_prob, batch, config)


def _of_prepare(prepared: Mapping[str, Tensor] | None, config: Any) -> Mapping[str, Tensor]:
    if prepared is None:
        raise ConfigError(
            f"policy_loss.loss_mode={_settings(config).loss_mode} compares the responses to one prompt: it needs what "
            "its prepare hook (get_policy_loss_prepare) finds in the whole mini-batch"
        )
    return prepared


def _group_errors(config: PPOConfig) -> Iterator[str]:
    """What needs token losses."""
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    weights = config.algorithm.rollout_correction.rollout_is
    if weights:
        yield (
            f"'algorithm.rollout_correction.rollout_is' is {weights}, but {POLICY_LOSS}={name} has no token losses to "
            "weigh; leave it out"
        )


_PAIRED = ("beta", "pair_loss", "label_smoothing")


def _spin_errors(config: PPOConfig) -> Iterator[str]:
    """What is defined for sampled responses only."""
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    correction = algorithm.rollout_correction
    unfit = {
        "actor_rollout_ref.rollout.multi_turn.enable": policy.rollout.multi_turn.enable,
        "actor_rollout_ref.rollout.agent.default_agent_loop": policy.rollout.agent.given,
        "actor_rollout_ref.actor.use_kl_loss": policy.actor.use_kl_loss,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.rollout_correction.bypass_mode": correction.bypass_mode,
        "algorithm.rollout_correction.rollout_rs": correction.rollout_rs,
    }
    yield from _group_errors(config)
    for name, value in unfit.items():
        if value:
            yield (
                f"'{name}' is {value}, but {POLICY_LOSS}=spin also trains on the data's answers, which were not "
                "sampled; leave it out"
            )


@register_policy_loss(
    "spin",
    prepare=spin_pairs,
    needs=("ref_log_prob", "from_data", "old_log_probs"),
    reads=_PAIRED,
    whole_groups=True,
    reads_advantages=False,
    check=_spin_errors,
)
@register_policy_loss(
    "online_dpo",
    prepare=online_dpo_pairs,
    needs=("ref_log_prob",),
    reads=(*_PAIRED, "pairs"),
    whole_groups=True,
    compares_responses=True,
    reads_advantages=False,
    check=_group_errors,
)
def pair_loss(
    log_prob: Tensor,
    response_mask: Tensor,
    config: Any = None,
    prepared: Mapping[str, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """The loss `policy_loss.pair_loss`, the mean over the mini-batch's pairs, whatever the aggregation mode: of the
    policy's own responses, ordered by reward (online_dpo), or with the data's answer as the better one (spin)."""
    prepared = _of_prepare(prepared, config)
    # A row of padding is a copy of another, with an empty mask.
    real = as_bool(response_mask).any(-1)
    mine = {key: torch.where(real, values.to(real.device), 0.0) for key, values in prepared.items()}
    dp_size = (getattr(config, "global_batch_info", None) or {}).get("dp_size", 1)
    loss = additive_loss(log_prob, response_mask, mine["weight"], mine["value"]) * dp_size
    return loss, {f"actor/{key}": Metric(mine[key].sum(), "sum") for key in _METRICS}


def sppo_targets(response_mask: Tensor, config: Any, batch: Any) -> dict[str, Tensor]:
    """`target` [B]: sppo_eta (win rate - 1/2)."""
    responses = _Responses(batch, response_mask)
    rates = win_rates(responses.rewards, responses.index, responses.usable)
    return {"target": responses.every_row(_settings(config).sppo_eta * (rates - 0.5))}


def _sppo_errors(config: PPOConfig) -> Iterator[str]:
    yield from _group_errors(config)
    turns = config.actor_rollout_ref.rollout.multi_turn
    if turns.splits:
        yield (
            f"{POLICY_LOSS}=sppo needs a response in one row, but actor_rollout_ref.rollout.multi_turn.{turns.splits} "
            f"makes several; use {turns.one_row}"
        )


@register_policy_loss(
    "sppo",
    prepare=sppo_targets,
    reads=("sppo_eta", "loss_agg_mode"),
    whole_groups=True,
    compares_responses=True,
    reads_advantages=False,
    check=_sppo_errors,
)
def sppo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    prepared: Mapping[str, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """(log pi / old of the response - target)^2, repeated on each of its tokens, so that every aggregation mode
    applies; `seq-mean-token-mean` is the paper's mean over responses."""
    target = _of_prepare(prepared, config)["target"]
    mask = as_bool(response_mask)
    moved = keep(log_prob, mask) - keep(old_log_prob, mask).detach()
    gap = moved.sum(-1) - target.to(moved)
    counts = getattr(config, "global_batch_info", None) or {}
    losses = gap.square().unsqueeze(-1).expand_as(log_prob)
    return agg_loss(losses, mask, loss_agg_mode, **counts), {
        "actor/sppo_gap": masked_mean(gap.detach().abs().unsqueeze(-1).expand_as(log_prob), mask),
        "actor/ppo_kl": masked_mean(-moved.detach(), mask),
    }
