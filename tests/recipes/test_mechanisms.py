"""What each recipe does that the defaults do not: shown on planted numbers, gone when one of its keys is removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.recipes.planted import (
    GREEDY,
    LENGTHS,
    MASK,
    OLD,
    PROCESS,
    REF,
    SCORES,
    config,
    gradient,
    group_mean,
    learn,
    rows,
    spread,
)
from verl.config.plan import batch_plan
from verl.config.recipes import read_recipe
from verl.config.schema import PPOConfig
from verl.data.proto import DataProto
from verl.errors import ConfigError
from verl.trainer.experience import DynamicSampling

Mechanism = Callable[[PPOConfig], None]
MECHANISMS: dict[str, Mechanism] = {}
TOKENS = int(MASK.sum())
ONES = torch.ones(8, 4)
SIGNS = rows([1.0, -1.0] * 4)


def mechanism(function: Mechanism) -> Mechanism:
    """Asserts what is special about the recipe of the same name."""
    MECHANISMS[function.__name__] = function
    return function


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype), atol=1e-6, rtol=1e-4)


def grpo_advantages(cfg: PPOConfig) -> None:
    std = SCORES.view(2, 4).std(-1).repeat_interleave(4)
    same(learn(cfg).batch["advantages"], spread((SCORES - group_mean(SCORES)) / (std + 1e-6)))
    assert not cfg.critic.enable


def kl_in_reward(cfg: PPOConfig, coef: float) -> torch.Tensor:
    """The rewards per token, after checking them."""
    batch = learn(cfg).batch
    wanted = batch["token_level_scores"] - coef * (OLD - REF) * MASK
    same(batch["token_level_rewards"] * MASK, wanted)
    return wanted


def one_plain_step(cfg: PPOConfig, tokens_or_rows: int) -> None:
    """-A logp at any ratio, and one optimiser step per batch."""
    same(gradient(cfg, 5 * ONES, SIGNS), -SIGNS * MASK / tokens_or_rows)
    assert batch_plan(cfg).optimiser_steps == 1


@mechanism
def dapo(cfg: PPOConfig) -> None:
    grpo_advantages(cfg)
    assert cfg.actor_rollout_ref.rollout.n == 16
    # Below 1.28 a token still grows; above 0.8 it still falls; every token weighs the same.
    ratio = rows([1.27, 0.81, 1.29, 0.79, 1.27, 0.81, 1.29, 0.79])
    inside = rows([1.0, 1.0, 0.0, 0.0] * 2)
    same(gradient(cfg, ratio, SIGNS), -SIGNS * ratio * inside * MASK / TOKENS)
    # What they do is shown by a run, in test_runs.py.
    assert cfg.algorithm.filter_groups.enable and cfg.reward.overlong_buffer.enable


@mechanism
def dr_grpo(cfg: PPOConfig) -> None:
    same(learn(cfg).batch["advantages"], spread(SCORES - group_mean(SCORES)))
    # The denominator is the same whatever the lengths of the responses.
    same(gradient(cfg, ONES, SIGNS), -SIGNS * MASK / (8 * cfg.data.max_response_length))
    assert cfg.actor_rollout_ref.rollout.n == 8


@mechanism
def gspo(cfg: PPOConfig) -> None:
    grpo_advantages(cfg)
    # Ratios of tokens far from 1 whose mean over the response is 1: nothing is clipped.
    swing = torch.ones(8, 4)
    swing[1] = torch.tensor([2.0, 0.5, 4.0, 0.25])
    per_token = -SIGNS * MASK / LENGTHS.unsqueeze(-1) / 8
    same(gradient(cfg, swing, SIGNS), per_token)
    # All tokens a little off: the clip range is that of responses.
    near = rows([1.00035, 0.99975] * 4)
    same(gradient(cfg, near, SIGNS), per_token * near)
    same(gradient(cfg, rows([1.0005, 1.0] * 4), SIGNS), per_token * rows([0.0, 1.0] * 4))
    same(gradient(cfg, rows([1.0, 0.9996] * 4), SIGNS), per_token * rows([1.0, 0.0] * 4))


@mechanism
def cispo(cfg: PPOConfig) -> None:
    grpo_advantages(cfg)
    # No token loses its gradient; weights are at most 5 and have no lower bound.
    ratio, weight = rows([10.0, 10.0, 0.01, 0.01] * 2), rows([5.0, 5.0, 0.01, 0.01] * 2)
    same(gradient(cfg, ratio, SIGNS), -weight * SIGNS * MASK / TOKENS)


@mechanism
def sapo(cfg: PPOConfig) -> None:
    grpo_advantages(cfg)
    ratio = rows([3.0, 0.3] * 4)
    tau = rows([1.0, 1.05] * 4)
    gate = torch.sigmoid(tau * (ratio - 1))
    slope = 4 * gate * (1 - gate) * ratio
    same(gradient(cfg, ratio, SIGNS), -SIGNS * slope * MASK / LENGTHS.unsqueeze(-1) / 8)


@mechanism
def reinforce_plus_plus(cfg: PPOConfig) -> None:
    returns = kl_in_reward(cfg, 0.01).flip(-1).cumsum(-1).flip(-1)
    flat = returns[MASK.bool()]
    wanted = (returns - flat.mean()) / flat.std() * MASK
    same(learn(cfg).batch["advantages"], wanted)
    assert not cfg.critic.enable


@mechanism
def rloo(cfg: PPOConfig) -> None:
    score = kl_in_reward(cfg, 0.03).sum(-1)
    others = (4 * group_mean(score) - score) / 3
    same(learn(cfg).batch["advantages"], spread(score - others))
    one_plain_step(cfg, 8)
    assert cfg.actor_rollout_ref.rollout.n == 4


@mechanism
def remax(cfg: PPOConfig) -> None:
    to_go = kl_in_reward(cfg, 0.05).flip(-1).cumsum(-1).flip(-1)
    same(learn(cfg).batch["advantages"], (to_go - GREEDY.unsqueeze(-1)) * MASK)
    one_plain_step(cfg, 8)


@mechanism
def opo(cfg: PPOConfig) -> None:
    weighted = (LENGTHS * SCORES).view(2, 4).sum(-1) / LENGTHS.view(2, 4).sum(-1)
    same(learn(cfg).batch["advantages"], spread(SCORES - weighted.repeat_interleave(4)))
    one_plain_step(cfg, TOKENS)


@mechanism
def gpg(cfg: PPOConfig) -> None:
    alpha = 8 / 6  # two of eight scores are 0
    same(learn(cfg).batch["advantages"], spread(alpha * (SCORES - group_mean(SCORES))))
    one_plain_step(cfg, TOKENS)


@mechanism
def pf_ppo(cfg: PPOConfig) -> None:
    drawn = learn(cfg).batch["token_level_scores"].sum(-1)
    assert len(drawn) == 8
    assert 0.0 not in drawn and drawn.abs().mean() > SCORES.abs().mean()
    assert cfg.critic.enable and cfg.actor_rollout_ref.rollout.n == 5


def pair_gradient(cfg: PPOConfig, better: list[list[int]], worse: list[list[int]]) -> None:
    """DPO's, at planted log-ratios to the reference; `better` and `worse` are the rows of each pair."""
    ratio = rows([1.1, 0.9, 1.2, 0.8, 1.0, 1.3, 0.7, 1.0])
    log_ratio = ((OLD + ratio.log() - REF) * MASK).sum(-1)
    wanted = torch.zeros(8)
    for up, down in zip(better, worse, strict=True):
        push = 0.1 * torch.sigmoid(-0.1 * (log_ratio[up] - log_ratio[down])) / len(better)
        wanted[up] -= push
        wanted[down] += push
    same(gradient(cfg, ratio), spread(wanted))
    assert not cfg.critic.enable


@mechanism
def online_dpo(cfg: PPOConfig) -> None:
    # The best against the worst response to each prompt.
    pair_gradient(cfg, better=[[3], [5]], worse=[[0], [6]])
    assert cfg.actor_rollout_ref.rollout.n == 2


@mechanism
def spin(cfg: PPOConfig) -> None:
    # The data's answer, whatever its score, against each of the policy's own.
    pair_gradient(cfg, better=[[2]] * 3 + [[4]] * 3, worse=[[0], [1], [3], [5], [6], [7]])
    # What they do is shown by a run, in test_runs.py.
    assert cfg.reward.reward_manager.name == "none" and cfg.trainer.ref_update_freq == 1


@mechanism
def sppo(cfg: PPOConfig) -> None:
    difference = SCORES.view(2, 4, 1) - SCORES.view(2, 1, 4)
    wins = (torch.sigmoid(difference).sum(-1) - 0.5).view(8) / 3  # 0.5 is that against itself
    ratio = rows([1.1, 0.9, 1.2, 0.8, 1.0, 1.3, 0.7, 1.0])
    gap = (ratio.log() * MASK).sum(-1) - 1000 * (wins - 0.5)
    same(gradient(cfg, ratio), spread(2 * gap / 8))
    assert cfg.actor_rollout_ref.rollout.n == 5 and not cfg.critic.enable


@mechanism
def prime(cfg: PPOConfig) -> None:
    others = (4 * group_mean(SCORES) - SCORES) / 3
    means = (PROCESS * MASK).sum(-1) / LENGTHS
    process = (PROCESS - ((4 * group_mean(means) - means) / 3).unsqueeze(-1)) * MASK
    returns = 5 * spread(SCORES - others) + 5 * process.flip(-1).cumsum(-1).flip(-1)
    flat = returns[MASK.bool()]
    same(learn(cfg).batch["advantages"], (returns - flat.mean()) / flat.std() * MASK)
    assert cfg.actor_rollout_ref.rollout.n == 4 and cfg.algorithm.filter_groups.enable
    hard, medium, easy = [0.1, 0.1, 0.1, 0.2], [0.0, 1.0, 0.0, 1.0], [1.0, 0.9, 0.9, 0.9]
    assert kept(cfg, [hard, medium, easy]) == medium


def kept(cfg: PPOConfig, groups: list[list[float]]) -> list[float]:
    """The scores of the responses that dynamic sampling keeps."""
    scores = torch.tensor(groups).view(-1, 1)
    batch = DataProto.from_dict(
        {
            "prompts": torch.ones_like(scores),
            "responses": torch.ones_like(scores),
            "response_mask": torch.ones_like(scores),
            "token_level_scores": scores,
        },
        {
            "uid": [number for number, group in enumerate(groups) for _ in group],
            "reward_extra": [{} for _ in scores],
            "reward_error": [None for _ in scores],
        },
    )
    sampling = DynamicSampling(cfg, 0)
    sampling.add(batch, {})
    return sampling.result()[0].batch["token_level_scores"].flatten().tolist()


@mechanism
def on_policy_distillation(cfg: PPOConfig) -> None:
    same(gradient(cfg, ONES, SIGNS, kl=torch.rand(8, 4)), MASK / TOKENS)
    assert not cfg.critic.enable
    assert cfg.reward.reward_manager.name == "none"  # shown by a run, in test_runs.py


@mechanism
def self_distillation(cfg: PPOConfig) -> None:
    same(gradient(cfg, ONES, SIGNS, kl=torch.rand(8, 4)), MASK / TOKENS)
    assert not cfg.critic.enable
    teacher = cfg.actor_rollout_ref.teacher
    assert (teacher.source, teacher.kl) == ("start", "jensen_shannon")
    assert teacher.prompt_template
    assert "2 + 2" in teacher.prompt_template.format(prompt="2 + 2", ground_truth="4")


OWN_KEYS = {"on_policy_distillation": ["actor_rollout_ref.teacher.path=teacher"]}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_recipe_does_what_is_special_about_it(name: str) -> None:
    MECHANISMS[name](config(name, *OWN_KEYS.get(name, [])))


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in MECHANISMS for key in read_recipe(name).keys]
)
def test_each_key_is_needed_for_it(name: str, key: str) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        MECHANISMS[name](config(name, *OWN_KEYS.get(name, []), f"~{key}"))
