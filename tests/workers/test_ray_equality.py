"""The same seed and config on one process, on two and on three ranks: the same numbers, step by step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.components

SETTINGS = {
    "grpo": ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.ppo_mini_batch_size=5"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ],
    "prime": [
        "algorithm.adv_estimator=prime",
        "implicit_reward.optim.lr=1e-3",
        "implicit_reward.threshold=0.2",
        "implicit_reward.ppo_mini_batch_size=5",
    ],
}
COMPARED = {
    "grpo": ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "critic/score/mean"],
    "ppo": ["actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/score/mean"],
    "prime": [
        "actor/pg_loss",
        "actor/grad_norm",
        "implicit_reward/loss",
        "implicit_reward/accuracy",
        "implicit_reward/positive",
        "implicit_reward/grad_norm",
        "implicit_reward/process_rewards/mean",
        "implicit_reward/process_rewards/max",
    ],
}
PARTS = {"grpo": ["actor"], "ppo": ["actor", "critic"], "prime": ["actor", "implicit_reward"]}


def weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted((folder / "global_step_5" / part / "huggingface").glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "prime"])
def test_one_two_and_three_processes_agree(algorithm, train, joined):
    alone, alone_folder = train(*SETTINGS[algorithm], folder="alone")
    assert len(alone) == 5
    for world in (2, 3):
        rows, folder = train(*SETTINGS[algorithm], f"trainer.n_gpus_per_node={world}", folder=f"world{world}")
        for mine, one in zip(rows, alone, strict=True):
            for name in COMPARED[algorithm]:
                assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), (world, name)
        for part in PARTS[algorithm]:
            together, one = weights(folder, part), weights(alone_folder, part)
            assert together.keys() == one.keys() and one
            for name, tensor in one.items():
                torch.testing.assert_close(
                    together[name], tensor, rtol=1e-3, atol=2e-4, msg=f"{world} {part} {name}"
                )


def test_fewer_prompts_than_ranks(train, joined):
    """The second rank generates nothing; its updates match those of the first all the same."""
    settings = [
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "trainer.total_training_steps=2",
    ]
    alone, _ = train(*settings, folder="alone")
    ranks = [
        "trainer.n_gpus_per_node=2",
        "trainer.watchdog_s=120",
        "trainer.profile.steps=[2]",
        "trainer.profile.ranks=[1]",
    ]
    rows, folder = train(*settings, *ranks, folder="world2")
    for mine, one in zip(rows, alone, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
    assert [file.name for file in (folder / "profile").iterdir()] == ["step_2_rank_1.json.gz"]
    with gzip.open(folder / "profile" / "step_2_rank_1.json.gz", "rt") as text:
        assert any("Backward" in str(event["name"]) for event in json.load(text)["traceEvents"]), "its update"


def test_a_reward_model_with_adapters_resumes_on_ranks(train, joined):
    """Two ranks that continue from a checkpoint of theirs, against one process that never stopped."""
    settings = [*SETTINGS["prime"], "implicit_reward.model.lora_rank=4", "implicit_reward.update=after"]
    alone, _ = train(*settings, "trainer.total_training_steps=3", folder="alone")
    ranks = [*settings, "trainer.n_gpus_per_node=2"]
    train(*ranks, "trainer.total_training_steps=2", folder="world2")
    rows, _ = train(*ranks, "trainer.total_training_steps=3", folder="world2")
    assert len(rows) == len(alone) == 3
    for mine, one in zip(rows, alone, strict=True):
        for name in COMPARED["prime"]:
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
