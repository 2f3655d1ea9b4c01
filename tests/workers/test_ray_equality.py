"""The same seed and config on one process, on two and on three ranks: the same numbers, step by step."""

from __future__ import annotations

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
}
COMPARED = {
    "grpo": ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "critic/score/mean"],
    "ppo": ["actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/score/mean"],
}


def weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted((folder / "global_step_5" / part / "huggingface").glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_one_two_and_three_processes_agree(algorithm, train, joined):
    alone, alone_folder = train(*SETTINGS[algorithm], folder="alone")
    assert len(alone) == 5
    parts = ["actor", "critic"] if algorithm == "ppo" else ["actor"]
    for world in (2, 3):
        rows, folder = train(*SETTINGS[algorithm], f"trainer.n_gpus_per_node={world}", folder=f"world{world}")
        for mine, one in zip(rows, alone, strict=True):
            for name in COMPARED[algorithm]:
                assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), (world, name)
        for part in parts:
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
    rows, _ = train(*settings, "trainer.n_gpus_per_node=2", "trainer.watchdog_s=120", folder="world2")
    for mine, one in zip(rows, alone, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
