"""Names and signatures of verl's core_algos: the same numbers as ours, and plug-ins that import them train."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from verl.config.methods import ADV_ESTIMATOR, builtin_names
from verl.config.schema import ActorConfig
from verl.errors import ConfigError
from verl.trainer.ppo import core_algos

GROUPED = "token_level_rewards response_mask index epsilon"
LOSS = "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights"
# The public parameters of verl 0.9.1, in order: positional calls must keep working.
PARAMETERS = {
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lam",
    "compute_grpo_outcome_advantage": f"{GROUPED} norm_adv_by_std_in_grpo config",
    "compute_grpo_vectorized_outcome_advantage": f"{GROUPED} norm_adv_by_std_in_grpo config",
    "compute_grpo_passk_outcome_advantage": f"{GROUPED} norm_adv_by_std_in_grpo config",
    "compute_rloo_outcome_advantage": f"{GROUPED} config",
    "compute_rloo_vectorized_outcome_advantage": f"{GROUPED} config",
    "compute_opo_outcome_advantage": f"{GROUPED} config",
    "compute_reinforce_plus_plus_baseline_outcome_advantage": f"{GROUPED} config",
    "compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards response_mask config",
    "compute_remax_outcome_advantage": "token_level_rewards reward_baselines response_mask config",
    "compute_gpg_outcome_advantage": f"{GROUPED} f_norm",
    **{
        f"compute_policy_loss_{name}": LOSS
        for name in [
            "vanilla",
            "gspo",
            "sapo",
            "cispo",
            "gpg",
            "clip_cov",
            "kl_cov",
            "geo_mean",
            "dppo_tv",
            "dppo_kl",
            "dro",
        ]
    },
    "agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens global_batch_size loss_scale_factor",
    "compute_value_loss": "vpreds returns values response_mask cliprange_value loss_agg_mode",
    "kl_penalty": "logprob ref_logprob kl_penalty",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_positional_arguments_are_in_verls_order(name: str) -> None:
    wanted = PARAMETERS[name].split()
    assert list(inspect.signature(getattr(core_algos, name)).parameters)[: len(wanted)] == wanted


MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
SCORES = torch.tensor([1.0, 0.0, 3.0, 5.0])
INDEX = np.array(["a", "a", "b", "b"], dtype=object)


def rewards() -> torch.Tensor:
    """Each score on the last token of its response."""
    found = torch.zeros(MASK.shape)
    found[torch.arange(4), MASK.sum(-1) - 1] = SCORES
    return found


def test_grpo_and_rloo_by_hand() -> None:
    spread = torch.tensor([1.0, 0.0]).std()
    advantages, returns = core_algos.compute_grpo_outcome_advantage(rewards(), MASK, INDEX, 0.25)
    assert advantages[0, 0].item() == pytest.approx(0.5 / (spread.item() + 0.25))
    assert torch.equal(advantages, returns) and advantages[2, 1] == 0
    plain, _ = core_algos.compute_grpo_outcome_advantage(
        rewards(), MASK, INDEX, norm_adv_by_std_in_grpo=False
    )
    assert plain[:, 0].tolist() == [0.5, -0.5, -1.0, 1.0]
    left_out, _ = core_algos.compute_rloo_outcome_advantage(rewards(), MASK, INDEX)
    assert left_out[:, 0].tolist() == [1.0, -1.0, -2.0, 2.0]


def test_gae_takes_values_second() -> None:
    values = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(1))
    advantages, returns = core_algos.compute_gae_advantage_return(rewards(), values, MASK, 1.0, 1.0)
    # With gamma = lambda = 1 the return of a token is the reward still to come.
    assert torch.allclose(returns, SCORES.unsqueeze(-1) * MASK)
    assert advantages[MASK.bool()].mean().abs() < 1e-6


def test_gae_takes_gamma_before_lambda() -> None:
    values = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(1))
    _, returns = core_algos.compute_gae_advantage_return(rewards(), values, MASK, 0.5, 1.0)
    # With lambda = 1 the return of a token is the discounted reward still to come.
    to_the_end = MASK.flip(1).cumsum(1).flip(1) - 1
    assert torch.allclose(returns, SCORES.unsqueeze(-1) * 0.5**to_the_end * MASK)


def test_remax_takes_the_baselines_second() -> None:
    advantages, _ = core_algos.compute_remax_outcome_advantage(rewards(), torch.ones(4), MASK)
    assert advantages[:, 0].tolist() == [0.0, -1.0, 2.0, 4.0]


def test_gpg_divides_by_its_norm() -> None:
    # One of four scores is 0, so alpha is 4 / 3.
    advantages, _ = core_algos.compute_gpg_outcome_advantage(rewards(), MASK, INDEX, f_norm=2.0)
    assert advantages[:, 0].tolist() == pytest.approx([1 / 3, -1 / 3, -2 / 3, 2 / 3])


def test_losses_are_those_the_trainer_uses() -> None:
    for name in ("vanilla", "gspo", "dro"):
        assert getattr(core_algos, f"compute_policy_loss_{name}") is get_policy_loss_fn(name)
    old, new = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old, new, torch.ones(1, 2), torch.ones(1, 2), "token-mean", ActorConfig()
    )
    assert loss.item() == pytest.approx(-(1 + 1.2) / 2)  # the second ratio, e, is clipped at 1.2
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(0.5)


def test_every_member_of_the_enum_is_an_estimator() -> None:
    assert {member.value for member in core_algos.AdvantageEstimator} <= set(builtin_names(ADV_ESTIMATOR))
    assert get_adv_estimator_fn(core_algos.AdvantageEstimator.GRPO) is get_adv_estimator_fn("grpo")
    with pytest.raises(ConfigError, match="registered already"):
        core_algos.register_adv_est(core_algos.AdvantageEstimator.GAE)(lambda: None)


PLUGIN = """
import torch
import verl.utils.torch_functional as verl_F
from verl import DataProto
from verl.protocol import DataProto as SameDataProto
from verl.trainer.ppo.core_algos import (
    agg_loss, compute_grpo_outcome_advantage, kl_penalty, register_adv_est, register_policy_loss
)

assert DataProto is SameDataProto


@register_adv_est("half_grpo")
def half_grpo(token_level_rewards, response_mask, index, config=None, **kwargs):
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=config.get("norm_adv_by_std_in_grpo", True)
    )
    return advantages / 2, returns / 2


@register_policy_loss("plain_ratio")
def plain_ratio(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    ratio = torch.exp(log_prob - old_log_prob)
    low = config.policy_loss.get("no_such_key", 0.3)
    losses = -advantages * torch.clamp(ratio, 1 - low, 1 + config.clip_ratio)
    loss = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    moved = verl_F.masked_mean(kl_penalty(old_log_prob, log_prob, "k1"), response_mask)
    return loss, {"actor/moved": moved.detach().item()}
"""

REWARD = """
from verl.utils.reward_score import default_compute_score, gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = default_compute_score("openai/gsm8k", solution_str, ground_truth, extra_info)
    again = gsm8k.compute_score(solution_str, ground_truth)
    return {"score": 0.9 * right + 0.1 * (len(solution_str) % 2), "same": again}
"""


@pytest.mark.slow(seconds=4)
def test_a_plugin_and_a_reward_written_for_verl_train(
    tiny_model_dir, tmp_path: Path, fork_server: Any
) -> None:
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    (tmp_path / "my_reward.py").write_text(REWARD)
    rows = [{"prompt": "1 2 3", "data_source": "mine", "reward_model": {"ground_truth": "7"}}] * 8
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        "algorithm.adv_estimator=half_grpo",
        f"actor_rollout_ref.model.path={tiny_model_dir}", "data.train_files=train.jsonl",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.max_prompt_length=16",
        "data.max_response_length=8", "data.raw_prompts=True", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.policy_loss.loss_mode=plain_ratio", "trainer.plugins=[my_plugin]",
        "custom_reward_function.path=my_reward.py", "trainer.total_training_steps=2", "trainer.device=cpu",
        "trainer.default_local_dir=run",
    ]  # fmt: skip
    printed = tmp_path / "printed.txt"
    # `python -m` has the current folder on its path, a fork has not.
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    run = fork_server.start(
        "verl.trainer.main_ppo",
        keys,
        output=printed,
        environment={"PYTHONPATH": path},
        folder=tmp_path,
    )
    assert run.wait() == 0, printed.read_text()[-2000:]
    steps = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    text = json.dumps(steps[-1])
    assert "actor/moved" in text and "same" in text
