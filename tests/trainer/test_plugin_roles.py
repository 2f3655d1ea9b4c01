"""Roles of a plug-in, one frozen and one trained, in a training run: columns, updates, checkpoints, plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run, untimed
from tests.trainer.test_distillation import make_teacher
from verl.config.load import load_ppo_config
from verl.config.roles import find_role, model_roles, register_role, roles_of, saved_roles
from verl.errors import ConfigError
from verl.trainer.loop import RLLoop
from verl.trainer.main_ppo import run
from verl.workers.roles import RoleWorker


@pytest.fixture(scope="module")
def judge(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tiny_model_dir, tmp_path_factory.mktemp("judge"))


@pytest.fixture
def config(tiny_model_dir: Path, digits_data: Path, judge: Path, tmp_path: Path) -> Any:
    from tests.plugin_roles import with_roles

    def make(*extra: str, folder: str = "run") -> Any:
        keys = ("trainer.plugins=[tests.plugin_roles]", "trainer.save_freq=1", *extra)
        lines = tiny_run(tiny_model_dir, digits_data, *keys, folder=tmp_path / folder)
        return with_roles(load_ppo_config(lines), str(judge))

    return make


def test_the_run_has_them_because_the_loss_needs_their_columns(config):
    cfg = config()
    assert [role.name for role in roles_of(cfg)] == ["actor", "judge", "imitator"]
    assert [(role.key, role.model_key) for role in model_roles(cfg)][1:] == [
        ("judge", "judge"),
        ("imitator", "imitator.model"),
    ]
    assert saved_roles(cfg) == ["actor", "imitator"]
    cfg.actor_rollout_ref.actor.policy_loss.loss_mode = "vanilla"
    assert [role.name for role in roles_of(cfg)] == ["actor"]


def test_they_are_built_asked_trained_and_saved_like_ours(config, monkeypatch):
    batches = []
    step = RLLoop.step

    def watched(loop: Any) -> Any:
        metrics = step(loop)
        batches.append(loop.batch)
        return metrics

    monkeypatch.setattr(RLLoop, "step", watched)
    folder = run(config("trainer.total_training_steps=2")).folder
    rows = read_metrics(folder)
    for row in rows:
        assert row["imitator/loss"] > 0 and row["imitator/grad_norm"] > 0 and "actor/judge_mean" in row
        assert {"timing_s/judge", "timing_s/imitator", "timing_s/update_imitator"} <= set(row)
    first = batches[0].batch
    assert first["judge_log_prob"].shape == first["response_mask"].shape and "imitator_log_prob" in first
    assert (folder / "global_step_2" / "imitator").is_dir()
    assert not (folder / "global_step_2" / "judge").exists()
    # A run that is resumed after the first step continues as this one did.
    resumed = config(
        "trainer.total_training_steps=2",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={folder}/global_step_1",
        folder="resumed",
    )
    assert untimed(read_metrics(run(resumed).folder))[-1] == untimed(rows)[-1]


def test_names_and_columns_are_provided_once():
    from tests.plugin_roles import Judge

    class Other(RoleWorker):
        pass

    with pytest.raises(ConfigError, match=r"role 'judge' is registered already, by .*Judge"):
        register_role("judge", columns=("other",))(Other)
    with pytest.raises(ConfigError, match=r"role 'mine' provides 'values', as does the role 'critic'"):
        register_role("mine", columns=("values",))(Other)
    with pytest.raises(
        ConfigError, match=r"role 'mine' is frozen and trains on 'returns'; give frozen=False"
    ):
        register_role("mine", columns=("mine",), trains_on=("returns",))(Other)
    register_role("judge", columns=("judge_log_prob",))(Judge)  # its module, imported again
    assert find_role("judge").worker_class() is Judge
