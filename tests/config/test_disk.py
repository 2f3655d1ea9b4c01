"""What checkpoints take on the disk is counted before a run begins, and compared with what is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl.config.load import from_dict
from verl.config.machine import Device
from verl.config.plan import RunPlan, disk_verdict, free_bytes
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.sizes import ModelSizes

SIZES = ModelSizes(
    parameters=1000, embedding=300, head=300, hidden=10, layers=2, cache=8, kept=50, kept_float32=20,
    norms=10, experts=0, linears=(("model.layers.0.q_proj", 20), ("model.layers.0.up_proj", 30)),
)  # fmt: skip
N, HEADLESS = SIZES.parameters, SIZES.value_parameters
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
GRPO = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}


def ppo(**more: Any) -> PPOConfig:
    return from_dict(PPOConfig, {f"{MODEL}.path": "m/m", "data.train_files": "o/d", **more}, checked=False)


def size(kind: str = "cpu", **more: Any) -> int:
    return planned_size(ppo(**more), kind)


def planned_size(config: PPOConfig | SFTConfig, kind: str = "cpu") -> int:
    plan = RunPlan(config, Device(kind, kind, None))
    plan.sizes = {role.name: SIZES for role in plan.roles}
    return plan.checkpoint_bytes


def test_a_checkpoint_holds_masters_moments_and_whole_weights() -> None:
    """float32 in one process: the whole weights are a second name of the masters' file."""
    assert size(**GRPO) == 12 * N
    assert size("cuda", **GRPO) == (4 + 8 + 2) * N
    assert size(**GRPO, **{"trainer.n_gpus_per_node": 2}) == (4 + 8 + 4) * N
    assert size() == 12 * N + 12 * HEADLESS, "PPO saves its critic, too"
    prime = {**GRPO, "algorithm.adv_estimator": "prime"}
    assert size(**prime) == 24 * N, "PRIME saves its reward model, but not the frozen start"
    assert size(**prime, **{"critic.enable": True}) == 24 * N + 12 * HEADLESS
    assert size(**prime, **{"implicit_reward.optim.moments": "int8"}) == (12 + 6) * N


def test_what_is_saved_and_how_is_counted() -> None:
    assert size(**GRPO, **{f"{ACTOR}.checkpoint.save_contents": ["hf_model"]}) == 4 * N
    assert size(**GRPO, **{f"{ACTOR}.checkpoint.save_contents": ["model", "extra"]}) == 4 * N
    assert size(**GRPO, **{f"{ACTOR}.optim.moments": "int8"}) == (4 + 2) * N
    assert size("cuda", **GRPO, **{f"{ACTOR}.optim.stochastic_rounding": True}) == (2 + 8) * N
    ends = SIZES.embedding + SIZES.head
    muon = {f"{ACTOR}.optim.name": "muon"}
    assert size(**GRPO, **muon) == (4 + 4) * N + 4 * ends, "AdamW's second moment is of the ends only"
    assert size(**GRPO, **muon, **{f"{MODEL}.freeze_embeddings": True}) < size(**GRPO, **muon)
    adapters = SIZES.lora_parameters(8, ["all-linear"])
    assert size(**GRPO, **{f"{MODEL}.lora_rank": 8}) == 12 * adapters + 4 * (N + adapters)
    sft = from_dict(SFTConfig, {"model.path": "m/m", "data.train_files": "o/d"}, checked=False)
    assert planned_size(sft) == 12 * N


def test_a_disk_without_room_for_one_is_an_error_with_the_key() -> None:
    cfg = ppo(**{"trainer.default_local_dir": "/runs/a"})
    verdict = disk_verdict(cfg, 10 * 2**30, 9 * 2**30)
    assert "trainer.default_local_dir=/runs/a" in verdict.error and "10.0 GiB" in verdict.error
    assert "9.0 GiB are free" in verdict.error and not verdict.warning
    assert disk_verdict(cfg, 10, 10, total_steps=5).error == ""


@pytest.mark.parametrize(
    ("settings", "steps", "present", "planned"),
    [
        ({}, 100, 0, 1),
        ({"trainer.save_freq": 10}, 95, 0, 10),
        ({"trainer.save_freq": 10}, 100, 4, 6),
        ({"trainer.save_freq": 10, "trainer.max_actor_ckpt_to_keep": 2}, 100, 0, 3),
        ({"trainer.save_freq": 10, "trainer.max_actor_ckpt_to_keep": 2}, 100, 2, 1),
        ({"trainer.save_freq": 10, "trainer.max_actor_ckpt_to_keep": 2, "trainer.keep_best": "v"}, 100, 0, 4),
        ({"trainer.save_freq": 60, "trainer.max_actor_ckpt_to_keep": 9}, 100, 0, 2),
    ],
)
def test_room_for_all_that_are_planned_is_counted(
    settings: dict[str, Any], steps: int, present: int, planned: int
) -> None:
    """One more than are kept: an old one goes after the new one is there."""
    enough = disk_verdict(ppo(**settings), 1000, planned * 1000, total_steps=steps, present=present)
    assert not enough.warning and not enough.error
    if planned > 1:
        short = disk_verdict(ppo(**settings), 1000, planned * 1000 - 1, total_steps=steps, present=present)
        assert f"{planned} checkpoints" in short.warning and f"enough for {planned - 1}" in short.warning
        for key in ("trainer.default_local_dir", "trainer.save_freq", "trainer.max_actor_ckpt_to_keep"):
            assert key in short.warning


@pytest.mark.parametrize(("settings", "planned"), [({}, 3), ({"trainer.save_freq": 50}, 12)])
def test_checkpoints_of_better_validations_are_counted(settings: dict[str, Any], planned: int) -> None:
    """Without save_freq two are kept, and one more is there while saving."""
    given = {"model.path": "m/m", "data.train_files": "o/d", "data.val_files": "o/d", "trainer.test_freq": 10}
    cfg = from_dict(SFTConfig, {**given, "trainer.early_stop_patience": 2, **settings})
    assert not disk_verdict(cfg, 1000, planned * 1000, total_steps=100).warning
    assert f"{planned} checkpoints" in disk_verdict(cfg, 1000, planned * 1000 - 1, total_steps=100).warning


def test_free_space_is_that_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") is not None
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.5)
