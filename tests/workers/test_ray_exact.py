"""`trainer.exact` on two ranks: each computes with gathered weights, so every token is exact there too."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.components

EXACT = ["trainer.exact=True", "trainer.n_gpus_per_node=2"]


def test_two_ranks_train_on_the_log_probs_they_drew(train):
    rows, _ = train(*EXACT, "actor_rollout_ref.actor.ppo_mini_batch_size=5", folder="exact")
    assert len(rows) == 5
    assert all(row["training/rollout_probs_diff_max"] == 0.0 for row in rows)
    assert rows[-1]["actor/grad_norm"] > 0
