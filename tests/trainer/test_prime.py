"""PRIME in the training loop: when its reward model learns, from which outcomes, and what is drawn and resumed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny_run import untimed
from verl.algorithms import get_adv_estimator_fn, masked_whiten

PRIME = ("algorithm.adv_estimator=prime", "implicit_reward.optim.lr=1e-2", "implicit_reward.threshold=0.2")


def test_the_reward_model_learns_before_or_after_it_scores(watch):
    before = watch(*PRIME)
    order = [update.role for update in before.updates]
    assert order == ["implicit_reward", "actor"] * 2
    assert before.row(1)["implicit_reward/process_rewards/max"] > 0, "trained on this batch already"
    after = watch(*PRIME, "implicit_reward.update=after", folder="after")
    assert [update.role for update in after.updates] == order
    first, second = (after.batches[step].batch["process_rewards"] for step in (1, 2))
    assert torch.equal(first, torch.zeros_like(first)) and second.abs().max() > 0
    for name in ("loss", "grad_norm"):
        key = f"implicit_reward/{name}"
        assert before.row(1)[key] == after.row(1)[key], "the same first batch, scored by the same start"
    for row in before.rows:
        for name in ("accuracy", "positive", "lr", "skipped_updates", "process_rewards/mean"):
            assert np.isfinite(row[f"implicit_reward/{name}"])
        assert {"timing_s/implicit_reward", "timing_s/update_implicit_reward"} <= set(row)


def test_it_learns_from_the_outcomes_of_scored_responses(watch, reward_file):
    reward = reward_file("assert number % 3\nreturn float(len(set(words)) > 3)")
    seen = watch(*PRIME, reward, "reward.max_failure_ratio=1.0")
    (update,) = seen.of("implicit_reward", 1)
    tensors = update.mini.batch
    scored = tensors["response_mask"].bool().any(-1)
    assert bool(scored.any()) and not bool(scored.all())
    wanted = tensors["token_level_scores"].sum(-1) > 0.2
    assert torch.equal(tensors["outcome"].bool(), wanted)
    share = float(wanted[scored].double().mean())
    assert 0 < share < 1 and update.metrics["implicit_reward/positive"] == pytest.approx(share)


def test_advantages_join_the_outcome_with_process_rewards(watch):
    seen = watch(*PRIME, "trainer.total_training_steps=1")
    tensors, index = seen.batches[1].batch, seen.batches[1].non_tensor_batch["uid"]
    given = {
        "token_level_rewards": tensors["token_level_rewards"],
        "response_mask": tensors["response_mask"],
        "index": index,
    }
    wanted, _ = get_adv_estimator_fn("prime")(**given, process_rewards=tensors["process_rewards"])
    torch.testing.assert_close(tensors["advantages"], wanted)
    alone = watch(*PRIME, "algorithm.prime.process_coef=0", "trainer.total_training_steps=1", folder="alone")
    rloo = masked_whiten(get_adv_estimator_fn("rloo")(**given)[0], tensors["response_mask"])
    torch.testing.assert_close(alone.batches[1].batch["advantages"], rloo, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted, rloo, atol=1e-2)


def test_groups_outside_the_accuracy_bounds_are_dropped(watch, reward_file):
    """A quarter of the prompts each has a mean a little above 0, 0.25, 0.5 and 0.75."""
    reward = reward_file("return (number % 4) / 4 + 0.01 * len(set(words))")
    bounds = ["accuracy_lower_bound=0.2", "accuracy_upper_bound=0.6"]
    filtering = [f"algorithm.filter_groups.{each}" for each in ("enable=True", *bounds)]
    seen = watch(*PRIME, reward, *filtering, "trainer.total_training_steps=1")
    batch = seen.batches[1]
    scores = batch.batch["token_level_scores"].sum(-1).view(8, 4).mean(-1)
    assert bool(((scores >= 0.2) & (scores <= 0.6)).all())
    row = seen.row(1)
    assert row["training/num_gen_batches"] >= 2 and row["training/groups_out_of_bounds"] > 0.2


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(("implicit_reward.update=before", "implicit_reward.ppo_epochs=2"), id="full"),
        pytest.param(
            ("implicit_reward.update=after", "implicit_reward.model.lora_rank=4"),
            id="lora",
            marks=pytest.mark.slow(seconds=4),
        ),
    ],
)
def test_resuming_continues_with_the_same_reward_model(watch, extra):
    whole = watch(*PRIME, *extra, "trainer.total_training_steps=3", folder="whole")
    part = watch(*PRIME, *extra, "trainer.total_training_steps=2", folder="parts")
    assert (part.folder / "global_step_2" / "implicit_reward").is_dir()
    parts = watch(*PRIME, *extra, "trainer.total_training_steps=3", folder="parts")
    resumed, wanted = (seen.batches[3].batch["process_rewards"] for seen in (parts, whole))
    assert torch.equal(resumed, wanted) and wanted.abs().max() > 0
    assert untimed(parts.rows) == untimed(whole.rows)
