"""A batch the user did not choose fits their data; one they chose is theirs."""

from __future__ import annotations

import pytest

from verl.config.build import fit_batch
from verl.config.load import load_ppo_config, load_sft_config

GIVEN = ["actor_rollout_ref.model.path=m", "data.train_files=d.jsonl"]
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


@pytest.mark.parametrize(
    ("given", "rows", "batch", "mini"),
    [
        ([], 5000, 1024, 256),
        ([], 1000, 768, 256),
        ([], 256, 256, 256),
        ([], 97, 97, 97),
        ([], 1, 1, 1),
        ([f"{MINI}=32"], 97, 96, 32),
        ([f"{MINI}=128"], 97, 1024, 128),  # the loader refuses it, naming the key
        (["data.train_batch_size=512"], 97, 512, 256),
    ],
)
def test_prompts_of_a_step(given, rows, batch, mini):
    config = load_ppo_config([*GIVEN, *given])
    notices = fit_batch(config, rows)
    assert config.data.train_batch_size == batch
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == mini
    changed = batch != 1024 and given[:1] != ["data.train_batch_size=512"]
    assert bool(notices) == changed
    if changed:
        assert f"data.train_batch_size={batch}" in notices[0] and f"{rows} usable rows" in notices[0]


def test_rows_of_a_fine_tuning_step():
    config = load_sft_config(["model.path=m", "data.train_files=d.jsonl"])
    assert fit_batch(config, 64) == []
    assert "data.train_batch_size=10" in fit_batch(config, 10)[0] and config.data.train_batch_size == 10
