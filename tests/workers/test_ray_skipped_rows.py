"""Two ranks that leave rows without influence out, beside one process that computes all."""

from __future__ import annotations

import pytest
import torch

from tests.constant_groups import PROMPTS, N, scored, trained

KEY = "actor_rollout_ref.actor.skip_zero_advantage"

pytestmark = [pytest.mark.components, pytest.mark.timeout(900)]


def test_the_policy_is_the_same_after_three_steps(overrides, tiny_tokenizer, joined, tmp_path):
    from verl.config.load import load_ppo_config
    from verl.workers.local import LocalGroup
    from verl.workers.ray_group import RayGroup

    settings = overrides(
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.weight_decay=0.1",
        "algorithm.adv_estimator=grpo",
    )
    local = LocalGroup(load_ppo_config([*settings, f"{KEY}=False"]), tiny_tokenizer, training_steps=3)
    two = load_ppo_config([*settings, "trainer.n_gpus_per_node=2"])
    spread = RayGroup(two, tiny_tokenizer, training_steps=3, run_folder=tmp_path)
    skipping = LocalGroup(load_ppo_config(settings), tiny_tokenizer, training_steps=3)
    try:
        expected, found, one_process = trained(local), trained(spread), trained(skipping)
        for one, two_ranks in zip(one_process, found, strict=True):
            for name in ("actor/entropy", "training/rollout_probs_diff_mean", "training/rows_skipped"):
                assert two_ranks[name] == pytest.approx(one[name], rel=1e-4), name
        for plain, skipped in zip(expected, found, strict=True):
            assert skipped["training/rows_skipped"] > 0
            for name in ("actor/pg_loss", "actor/grad_norm"):
                assert skipped[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
        batch = scored(9)
        ours, theirs = (group.forward("actor", batch, ["old_log_probs"]).batch for group in (spread, local))
        torch.testing.assert_close(ours["old_log_probs"], theirs["old_log_probs"], rtol=1e-4, atol=1e-5)
    finally:
        spread.close()
        local.close()
        skipping.close()
