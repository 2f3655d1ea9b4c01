"""Losses that compare responses, and a reference that follows the policy, on several ranks: one process's numbers."""

from __future__ import annotations

import json

import pytest

from tests.tiny_run import own_methods, untimed

pytestmark = pytest.mark.components

LOSS = "actor_rollout_ref.actor.policy_loss"
COMMON = ["trainer.ref_update_freq=2", "actor_rollout_ref.actor.ppo_mini_batch_size=5", f"{LOSS}.beta=0.5"]
NAMES = ["pg_loss", "grad_norm", "margin", "accuracy", "pairs", "tied_groups"]


@pytest.fixture
def settings(digits_data, tmp_path):
    rows = [json.loads(line) for line in (digits_data / "train.jsonl").read_text().splitlines()]
    file = tmp_path / "answers.jsonl"
    answers = [{**row, "response": row["reward_model"]["ground_truth"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in answers))
    return {
        "online_dpo": [f"{LOSS}.loss_mode=online_dpo", f"{LOSS}.pairs=all"],
        "spin": [
            f"{LOSS}.loss_mode=spin",
            f"data.train_files={file}",
            "reward.reward_manager.name=none",
            "~reward.custom_reward_function.path",
        ],
    }


@pytest.mark.parametrize(
    ("loss", "world", "lora"), [("online_dpo", 2, 0), ("online_dpo", 2, 4), ("spin", 3, 0)]
)
def test_ranks_agree_with_one_process(train, joined, settings, loss, world, lora):
    """Three ranks do not divide the 50 rows of SPIN: one row of padding, which counts in nothing."""
    extra = [*settings[loss], *COMMON, f"actor_rollout_ref.model.lora_rank={lora}"]
    alone, _ = train(*extra, folder="alone")
    rows, _ = train(*extra, f"trainer.n_gpus_per_node={world}", folder="several")
    for mine, one in zip(rows, alone, strict=True):
        for name in NAMES:
            assert mine[f"actor/{name}"] == pytest.approx(one[f"actor/{name}"], rel=2e-3, abs=5e-4), name


@pytest.mark.parametrize("lora", [0, 4])
def test_a_resumed_run_on_two_ranks_has_the_refreshed_reference(train, joined, settings, lora):
    extra = [
        *settings["online_dpo"], *COMMON, "trainer.n_gpus_per_node=2", f"actor_rollout_ref.model.lora_rank={lora}",
    ]  # fmt: skip
    whole, _ = train(*extra, folder="whole")
    train(*extra, "trainer.total_training_steps=3", folder="parts")
    parts, _ = train(*extra, folder="parts")
    assert untimed(parts) == untimed(whole)


@pytest.mark.usefixtures("own_methods", "joined")
def test_a_plug_in_gets_its_columns_on_every_rank(train, digits_data, tmp_path):
    extra = own_methods(digits_data, tmp_path)
    alone, _ = train(*extra, folder="alone")
    rows, _ = train(*extra, "trainer.n_gpus_per_node=2", folder="several")
    for mine, one in zip(rows, alone, strict=True):
        for name in ("actor/pg_loss", "actor/distance", "critic/vf_loss"):
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=5e-4), name
