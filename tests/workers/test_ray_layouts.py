"""Ranks that split the sequences of their rows among them give the numbers of one process, whatever role is split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.components

STEPS = "trainer.total_training_steps=3"
SPLIT = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
GRPO = [
    STEPS,
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=5",
]
PPO = [
    STEPS,
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "critic.optim.lr=1e-3",
    "actor_rollout_ref.model.lora_rank=4",
]


def weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
    (file,) = (folder / "global_step_3" / part / "huggingface").glob("*.safetensors")
    return load_file(file)


def assert_alike(split: tuple[list[dict], Path], alone: tuple[list[dict], Path]) -> None:
    """Every metric of the roles, and the weights."""
    assert len(split[0]) == len(alone[0]) == 3
    for mine, one in zip(split[0], alone[0], strict=True):
        names = {name for name in one if name.startswith(("actor/", "critic/"))}
        assert names == {name for name in mine if name.startswith(("actor/", "critic/"))}
        for name in names:
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
    for part in ("actor", "critic"):
        if (alone[1] / "global_step_3" / part).exists():
            together, one = weights(split[1], part), weights(alone[1], part)
            assert together.keys() == one.keys() and one
            for name, tensor in one.items():
                torch.testing.assert_close(together[name], tensor, rtol=1e-3, atol=2e-4, msg=f"{part} {name}")


def test_grpo_with_split_sequences(train, joined):
    """Two ranks with the same rows beside a reference with rows for each; then two such pairs."""
    alone = train(*GRPO, folder="alone")
    one_pair = "trainer.n_gpus_per_node=2", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1"
    assert_alike(train(*GRPO, SPLIT, *one_pair, folder="pair"), alone)
    assert_alike(train(*GRPO, SPLIT, "trainer.n_gpus_per_node=4", folder="pairs"), alone)


def test_ppo_with_an_adapter_on_split_sequences_and_a_critic_on_whole_ones(train, joined):
    """The reference is the actor below its adapter: it is laid out as the actor, whatever `ref` says."""
    alone = train(*PPO, folder="alone")
    others = (
        "critic.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1",
    )
    assert_alike(train(*PPO, SPLIT, *others, "trainer.n_gpus_per_node=2", folder="split"), alone)
