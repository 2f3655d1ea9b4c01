"""Ranks that are killed, hang or raise: who it was is said within a bounded time, and nobody stays behind."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from verl.errors import TrainingHalted
from verl.workers.outcome import WorkersLost

pytestmark = pytest.mark.components

_spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
assert _spec and _spec.loader
faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)

PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.optim.lr=1e-3"]
PHASES = [
    "model_size",
    "open_generation",
    "generate",
    "log_probs",
    "ref_log_probs",
    "values",
    "train_critic",
    "train_actor",
    "publish",
    "save",
]


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan(call: str, action: str, **more: object) -> str:
        return f"trainer.plugins=[{faults.write(tmp_path, call, action, **more)}]"

    return plan


def nobody_left() -> bool:
    deadline = time.monotonic() + 20
    while faults.rank_processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not faults.rank_processes()


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_named_and_the_run_goes_on_after_it(phase, train, joined, faulty):
    once = "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.n_gpus_per_node=2"
    plugin = faulty(phase, "kill", nth=1 if phase in ("model_size", "save") else 2)
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, *once, plugin)
    message = str(caught.value)
    assert message.startswith("rank 1 on ") and f"died in {phase}" in message, message
    assert "trainer.resume_mode=auto" in message
    assert nobody_left()
    if phase in ("train_actor", "generate"):
        rows, _ = train(*PPO, *once)
        assert [row["training/global_step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("phase", ["generate", "log_probs", "train_actor", "save"])
def test_a_hang_is_noticed_and_says_who_waits_for_whom(phase, train, joined, faulty):
    few = "trainer.total_training_steps=2", "trainer.n_gpus_per_node=2", "trainer.watchdog_s=6"
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, *few, faulty(phase, "hang"))
    message = str(caught.value)
    assert f"no sign of life for 6 s (trainer.watchdog_s) in {phase}" in message, message
    assert "(process " in message and "time.sleep(100_000)" in message
    first_rank_1 = message.index("rank 1 on")
    assert "stands still" in message[first_rank_1 : first_rank_1 + 300]
    if phase != "generate":
        assert "waits for rank 1" in message
    assert nobody_left()


def test_an_exception_comes_as_the_ranks_own_traceback(train, joined, faulty):
    with pytest.raises(TrainingHalted) as caught:
        train("trainer.n_gpus_per_node=2", faulty("train_actor", "raise"))
    message = str(caught.value)
    assert message.startswith("rank 1 on ") and "in train_actor: KeyError: 'the reason'" in message
    assert "Traceback (most recent call last)" in message and "fault_train_actor_raise" in message
    assert "ray.exceptions" not in message and "ray::" not in message
    assert nobody_left()


def test_lost_ranks_are_restarted_from_the_last_checkpoint(train, joined, faulty, tmp_path):
    """Killed in the third step: the run begins again after the second, and ends as one that was never killed."""
    common = "trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.n_gpus_per_node=2"
    plain, _ = train(*common, folder="plain")
    plugin = faulty("train_actor", "kill", nth=3, once=tmp_path / "happened")
    rows, _ = train(*common, plugin, "trainer.max_restarts=1", folder="killed")
    assert (tmp_path / "happened").exists()
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        assert rows[-1][name] == pytest.approx(plain[-1][name], rel=2e-3, abs=2e-5)
