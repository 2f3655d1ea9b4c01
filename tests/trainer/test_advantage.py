"""Rows that are turns of one conversation get what the conversation gets as one row."""

from __future__ import annotations

import pytest
import torch

from tests.turn_rows import turn_rows
from verl.algorithms import adv_estimator_names
from verl.config.schema import AlgorithmConfig, RolloutCorrectionConfig
from verl.trainer import advantage


# prime is refused where turns are rows.
@pytest.mark.parametrize("name", [name for name in adv_estimator_names() if name != "prime"])
def test_an_estimator_sees_conversations(name):
    rows = turn_rows()
    cfg = AlgorithmConfig(
        adv_estimator=name, gamma=0.9, lam=0.8, gdpo_reward_keys=["right", "form"] if name == "gdpo" else []
    )
    metrics = [advantage.estimate(batch, cfg) for batch in (rows.append, rows.split)]
    assert metrics[0] == metrics[1] and metrics[0]["training/groups"] == 5
    assert bool((rows.append.batch["advantages"] != 0).any())
    rows.same("advantages")
    rows.same("returns")


def test_turns_may_stand_anywhere_as_long_as_they_are_in_order():
    rows = turn_rows()
    cfg = AlgorithmConfig(adv_estimator="turn_rloo")
    # All first turns, then all second turns, and so on.
    seen: dict[str, int] = {}
    turn = []
    for name in rows.split.non_tensor_batch["session"]:
        turn.append(seen.get(name, 0))
        seen[name] = turn[-1] + 1
    order = torch.tensor(turn).argsort(stable=True)
    moved = rows.split[order]
    advantage.estimate(rows.split, cfg)
    advantage.estimate(moved, cfg)
    torch.testing.assert_close(moved.batch["advantages"], rows.split.batch["advantages"][order])
    assert bool((order != torch.arange(len(order))).any())


def test_the_kl_in_the_reward_is_that_of_conversations():
    rows = turn_rows()
    cfg = AlgorithmConfig(kl_penalty="k3")
    found = []
    for batch in (rows.append, rows.split):
        batch.batch["token_level_rewards"], kl = advantage.kl_in_reward(batch, cfg, 0.3)
        found.append(kl)
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0] > 0
    rows.same("token_level_rewards")


@pytest.mark.parametrize(
    "config",
    [
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
        {"rollout_is": "token"},
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
        {"rollout_rs": "seq_max_k2,token_k3", "rollout_rs_threshold": "3.0,0.5"},
    ],
    ids=str,
)
def test_rollout_correction_weighs_and_rejects_conversations(config):
    rows = turn_rows()
    cfg = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**config))
    found = []
    for batch in (rows.append, rows.split):
        batch.batch["kept"], metrics = advantage.correct_rollout(batch, cfg)
        found.append(metrics)
    assert found[0] == pytest.approx(found[1])
    rows.same("kept")
    if "rollout_is" in config:
        rows.same("rollout_is_weights")
    else:
        mask = rows.append.batch["response_mask"]
        assert 0 < int(rows.append.batch["kept"].sum()) < int(mask.sum()), "some are rejected, some are not"


def test_a_conversation_cut_at_the_limit_leaves_with_all_its_turns():
    rows = turn_rows()
    for batch in (rows.append, rows.split):
        batch.batch["kept"] = advantage.drop_overlong(batch, batch.batch["response_mask"])
    rows.same("kept")
    assert 0 < int(rows.split.batch["kept"].sum()) < len(rows.places)
