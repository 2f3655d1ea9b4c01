"""Online DPO, SPIN and SPPO through the real command's code path, and the reference that follows the policy."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.tiny_run import untimed
from verl.errors import DataError, RewardError
from verl.workers.local import LocalGroup

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
DPO = (f"{LOSS}=online_dpo", "actor_rollout_ref.actor.policy_loss.pairs=all")
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=64")
PAIRED = {f"actor/{name}" for name in ("margin", "accuracy", "pairs", "tied_pairs", "tied_groups")}


@pytest.fixture
def spin(digits_data, tmp_path):
    """Settings of a run without rewards; the answers are in the data."""
    rows = [json.loads(line) for line in (digits_data / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["solution"] = row["reward_model"]["ground_truth"]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"data.train_files={file}",
        "data.response_key=solution",
        f"{LOSS}=spin",
        "reward.reward_manager.name=none",
        "~reward.custom_reward_function.path",
    )


def finite(rows):
    assert all(math.isfinite(value) for row in rows for name, value in row.items() if name != "findings")
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    return rows


@pytest.mark.slow(seconds=6)
def test_online_dpo_prefers_what_is_rewarded(train):
    rows = finite(
        train(*DPO, "trainer.total_training_steps=12", "actor_rollout_ref.actor.policy_loss.beta=0.5")
    )
    assert set(rows[0]) >= PAIRED | {"timing_s/ref"}
    assert rows[0]["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-5), "policy and reference are equal"
    assert rows[0]["actor/margin"] == pytest.approx(0, abs=1e-5)
    later = rows[-6:]
    assert sum(row["actor/margin"] for row in later) > 0.6 and sum(row["actor/accuracy"] for row in later) > 3
    groups = 16
    assert all(row["actor/pairs"] + row["actor/tied_pairs"] == groups * 6 for row in rows), (
        "n (n - 1) / 2 each"
    )
    assert sum(row["reward/mean"] for row in rows[-3:]) > sum(row["reward/mean"] for row in rows[:3])


@pytest.mark.slow(seconds=5)
def test_spin_learns_the_datas_answers_without_any_reward(train, spin, tmp_path):
    rows = finite(train(*spin, "trainer.total_training_steps=16", "trainer.ref_update_freq=8"))
    assert set(rows[0]) >= PAIRED
    assert all(row["actor/pairs"] == 16 * 4 and row["reward/mean"] == 0 for row in rows)
    margins = [row["actor/margin"] for row in rows]
    assert max(abs(margins[0]), abs(margins[8])) < 1e-5, "policy and reference are equal"
    assert margins[7] > 0.1 and margins[15] < margins[7] / 2, "less is left to learn in the second iteration"
    lengths = [row["response_length/mean"] for row in rows]
    assert lengths[0] > 3 and abs(lengths[15] - 2) < 0.5, "an answer is one digit and the end"
    written = (tmp_path / "run" / "rollouts" / "1.jsonl").read_text().splitlines()
    assert len(written) == 16 * 4, "samples only, not the data's answers"


@pytest.mark.slow(seconds=4)
def test_spin_with_one_sample_for_each_prompt(train, spin):
    rows = finite(
        train(
            *spin,
            "trainer.total_training_steps=2",
            "actor_rollout_ref.rollout.n=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_epochs=2",
        )
    )
    assert all(row["actor/pairs"] == 8 for row in rows), "whole prompts, in the shuffled second pass too"


@pytest.mark.slow(seconds=4)
def test_sppo_raises_the_reward(train):
    eta = "actor_rollout_ref.actor.policy_loss.sppo_eta=20"
    rows = finite(train(f"{LOSS}=sppo", eta, "trainer.total_training_steps=12"))
    assert "timing_s/ref" not in rows[0] and rows[0]["actor/sppo_gap"] > 0
    assert sum(row["reward/mean"] for row in rows[-3:]) > sum(row["reward/mean"] for row in rows[:3])


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("loss", ["online_dpo", "spin", "sppo"])
def test_micro_batches_do_not_change_an_update(train, spin, loss):
    extra = spin if loss == "spin" else [f"{LOSS}={loss}"]
    one, several = (
        train(
            *extra,
            "trainer.total_training_steps=1",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
            folder=f"run_{size}",
        )[-1]
        for size in (80, 3)
    )
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert several[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


# -- the forward passes a loss costs ----------------------------------------------------------------------------


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    ("loss", "extra", "passes"),
    [
        ("online_dpo", ["actor_rollout_ref.actor.ppo_mini_batch_size=16"], 1),
        ("online_dpo", ["actor_rollout_ref.actor.ppo_mini_batch_size=8"], 1 + 1),
        (
            "online_dpo",
            [
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "algorithm.rollout_correction.bypass_mode=True",
            ],
            2,
        ),
        ("sppo", ["actor_rollout_ref.actor.ppo_mini_batch_size=16"], 0),
        ("sppo", ["actor_rollout_ref.actor.ppo_mini_batch_size=8"], 1),
    ],
)
def test_log_probs_that_are_known_are_not_computed_again(train, monkeypatch, loss, extra, passes):
    asked = []
    forward = LocalGroup.forward
    monkeypatch.setattr(
        LocalGroup,
        "forward",
        lambda self, role, batch, columns: (
            (role == "actor" and asked.append(len(batch))) or forward(self, role, batch, columns)
        ),
    )
    train(f"{LOSS}={loss}", *extra, "trainer.total_training_steps=1")
    assert len(asked) == passes, asked


# -- the reference ----------------------------------------------------------------------------------------------


def digest(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("adapted", [(), LORA], ids=["full", "lora"])
def test_the_reference_becomes_the_policy_and_stays_so_until_the_next_time(train, monkeypatch, adapted):
    from verl.trainer.loop import RLLoop

    seen = []

    def remember(workers):
        actor = workers.actor_engine.state()
        ref = (
            workers.engines()["ref"].state()["model"]
            if "ref" in workers.engines()
            else actor["extra"]["reference"]
        )
        seen.append((digest(actor["model"]), digest(ref)))

    step = RLLoop.step

    def watched(self):
        if not seen:
            remember(self.workers)
        metrics = step(self)
        remember(self.workers)
        return metrics

    monkeypatch.setattr(RLLoop, "step", watched)
    rows = train(*DPO, *adapted, "trainer.total_training_steps=5", "trainer.ref_update_freq=2")
    actors, references = zip(*seen, strict=True)
    assert same(actors[0], references[0]) and not same(actors[1], actors[0])
    for after, taken_at in ((1, 0), (2, 2), (3, 2), (4, 4), (5, 4)):
        assert same(references[after], actors[taken_at]), after
    # The margin of an update's first pass is 0 where the reference is the policy itself.
    margins = [abs(row["actor/margin"]) for row in rows]
    assert max(margins[0], margins[2], margins[4]) < 1e-5 < 1e-4 < min(margins[1], margins[3]), margins


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("adapted", [(), LORA], ids=["full", "lora"])
def test_a_resumed_run_has_the_refreshed_reference(train, adapted, tmp_path):
    common = (*DPO, *adapted, "trainer.ref_update_freq=2")
    whole = train(*common, "trainer.total_training_steps=5", folder="whole")
    train(*common, "trainer.total_training_steps=3", folder="parts")
    assert (tmp_path / "parts" / "global_step_3" / "ref").exists() == (not adapted)
    parts = train(*common, "trainer.total_training_steps=5", folder="parts")
    assert untimed(parts) == untimed(whole)


@pytest.mark.slow(seconds=4)
def test_a_resumed_spin_run_has_the_same_numbers(train, spin):
    common = (*spin, "trainer.ref_update_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.save_freq=1")
    whole = train(*common, "trainer.total_training_steps=4", folder="whole")
    train(*common, "trainer.total_training_steps=3", folder="parts")
    assert untimed(train(*common, "trainer.total_training_steps=4", folder="parts")) == untimed(whole)


@pytest.mark.slow(seconds=3)
def test_old_checkpoints_go_with_their_reference(train, tmp_path):
    keep = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.total_training_steps=3")
    train(*DPO, "trainer.ref_update_freq=1", *keep)
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_3"]


# -- bad input --------------------------------------------------------------------------------------------------


def test_answers_are_required_by_name(train, monkeypatch):
    from verl.trainer import assembly

    monkeypatch.setattr(assembly, "build_group", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(
        DataError, match=r"no column 'response' \(data.response_key\). It has: prompt, reward_model"
    ):
        train(f"{LOSS}=spin", "trainer.total_training_steps=1")


def test_a_reward_that_would_not_be_used_is_refused(train):
    with pytest.raises(
        RewardError, match="reward_manager.name=none scores every response 0, but a reward is given"
    ):
        train("reward.reward_manager.name=none", "trainer.total_training_steps=1")
