"""Recipes whose mechanism is in how a batch is made: one step on the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.recipes.conftest import Finished
from verl.config.load import load_ppo_config
from verl.errors import VerlError

Train = Callable[..., Finished]


@pytest.fixture
def half_is_constant(digits_data: Path) -> list[str]:
    """A reward that is right or wrong for odd digits, and always wrong for even ones."""
    path = digits_data / "odd_only.py"
    path.write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    right = float(int(ground_truth) % 2 and bool(solution_str.split()) and len(solution_str) % 3 == 0)\n"
        "    return {'score': right, 'acc': right}\n"
    )
    return [
        f"reward.custom_reward_function.path={path}",
        "algorithm.filter_groups.metric=acc",
        "reward.overlong_buffer.len=2",
    ]


def refilled(run: Finished) -> bool:
    """Whether every group has right and wrong responses, which took several rounds of generation."""
    groups: dict[str, set[float]] = {}
    for row in run.rollouts():
        groups.setdefault(row["uid"], set()).add(row["reward_acc"])
    several = run.metrics[0].get("training/num_gen_batches", 1) > 1
    return several and len(groups) == 8 and all(len(found) == 2 for found in groups.values())


def penalised(run: Finished) -> bool:
    """Whether the last two of the four tokens cost half a point each."""
    return all(row["score"] == row["reward_acc"] - max(row["length"] - 2, 0) / 2 for row in run.rollouts())


def test_dapo_replaces_constant_prompts_and_penalises_length(train: Train, half_is_constant) -> None:
    run = train("dapo", *half_is_constant)
    assert len(run.rollouts()) == 8 * 16
    assert refilled(run) and penalised(run)


@pytest.mark.parametrize(
    ("key", "fact"),
    [("algorithm.filter_groups.enable", refilled), ("reward.overlong_buffer.enable", penalised)],
)
def test_dapo_without_one_of_the_two(train: Train, half_is_constant, key: str, fact) -> None:
    assert not fact(train("dapo", *half_is_constant, f"~{key}"))


def test_remax_scores_a_greedy_response_besides(train: Train) -> None:
    run = train("remax")
    assert len(run.rollouts()) == 8 and run.metrics[0]["reward/calls"] == 16


@pytest.fixture
def answers(digits_data: Path) -> list[str]:
    """Prompts with an answer each; the reward that the tiny run would have is taken away."""
    path = digits_data / "answers.jsonl"
    rows = map(json.loads, (digits_data / "train.jsonl").read_text().splitlines())
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row | {"response": row["reward_model"]["ground_truth"]}) + "\n")
    return [f"data.train_files={path}", "~reward.custom_reward_function"]


def test_spin_refreshes_the_reference_and_needs_no_reward(train: Train, answers: list[str]) -> None:
    two = [*answers, "trainer.total_training_steps=2"]
    first, second = train("spin", *two).metrics
    assert first["actor/pairs"] == 8 and first["reward/failed"] == 0
    assert first["actor/margin"] == second["actor/margin"] == 0, (
        "at the start of a step both policies are the same"
    )
    frozen = train("spin", *two, "~trainer.ref_update_freq", folder="frozen").metrics
    assert frozen[1]["actor/margin"] != 0
    with pytest.raises(VerlError):
        train("spin", *two, "~reward.reward_manager.name", folder="scored")


def test_distillation_needs_no_reward(train: Train, answers: list[str], tiny_model_dir: Path) -> None:
    teacher = f"actor_rollout_ref.teacher.path={tiny_model_dir}"
    (row,) = train("on_policy_distillation", *answers, teacher).metrics
    assert abs(row["actor/distillation_kl"]) < 1e-5, "the student starts as its teacher"
    with pytest.raises(VerlError):
        train("on_policy_distillation", *answers, teacher, "~reward.reward_manager.name", folder="scored")


def test_the_run_folder_has_the_keys_and_the_run_resumes(train: Train) -> None:
    first = train("dr_grpo", "actor_rollout_ref.rollout.n=4")
    saved = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert saved["algorithm"]["norm_adv_by_std_in_grpo"] is False
    assert saved["actor_rollout_ref"]["rollout"]["n"] == 4, "the user's value stands above the recipe's"
    again = load_ppo_config(["--config-path", str(first.folder), "--config-name", "config"])
    assert again.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    second = train("dr_grpo", "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=2")
    assert [row["step"] for row in second.metrics] == [1, 2]
    assert second.metrics[0] == first.metrics[0], "step 1 was not done again: its times are the same"
