"""Ranks that are killed, hang or raise, in every phase: who it was is said within a bounded time, nobody stays behind.

Of the phases of a step `adv` and `reward` are the controller's own: a rank that dies meanwhile is missed at its next
call. Validation (`testing`) generates as training does; its calls are the first ones of a run.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.workers import faults
from tests.workers.faults import CALLS, PPO, extended
from verl.errors import ConfigError, TrainingHalted, WorkersLost

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

SMALL = ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.n_gpus_per_node=2"]
PHASES = ["testing", *CALLS]


@pytest.fixture
def faulty(tmp_path, digits_data, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan(phase: str, action: str, **more: object) -> list[str]:
        if phase == "testing":
            validation = [f"data.val_files={digits_data}/val.jsonl", "trainer.val_before_train=True"]
            return [*validation, *plan("generate", action, **{**more, "nth": 1})]
        return [f"trainer.plugins=[{faults.write(tmp_path, phase, action, **more)}]"]

    return plan


@pytest.fixture
def nobody_left(session_folder):
    return lambda: faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)


@pytest.mark.parametrize("phase", extended(PHASES, ["generate", "train_critic", "save"]))
def test_a_killed_rank_is_named_and_the_run_goes_on_after_it(phase, train, joined, faulty, nobody_left):
    plugin = faulty(phase, "kill", nth=1 if phase == "save" else 2)
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, *SMALL, *plugin)
    message = str(caught.value)
    call = "generate" if phase == "testing" else phase
    assert message.startswith("rank 1 on ") and f"died in {call}" in message, message
    assert "trainer.resume_mode=auto" in message
    assert nobody_left()
    if phase == "train_actor":
        rows, _ = train(*PPO, *SMALL)
        assert [row["training/global_step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("phase", extended(["reward", "adv"], ["reward"]))
def test_a_rank_that_dies_while_the_controller_works_is_named(
    phase, train, joined, faulty, nobody_left, tmp_path, monkeypatch
):
    note = tmp_path / "rank 1"
    with (
        faults.before_phase(monkeypatch, phase, lambda: os.kill(int(note.read_text()), signal.SIGKILL)),
        pytest.raises(WorkersLost) as caught,
    ):
        train(*PPO, *SMALL, *faulty("rehearse_save", "note", note=note))
    message = str(caught.value)
    next_call = {"reward": "log_probs", "adv": "train_critic"}[phase]
    assert message.startswith("rank 1 on ") and f"died in {next_call}" in message, message
    assert nobody_left()


@pytest.mark.parametrize("phase", extended(PHASES, ["testing", "train_actor", "update_weights"]))
def test_a_hang_is_noticed_and_says_who_waits_for_whom(
    phase, train, joined, faulty, nobody_left, tmp_path, monkeypatch
):
    from verl.workers.ray_calls import RankCalls

    hung, look = tmp_path / "hung", RankCalls.check_progress
    # On a busy machine the start alone may take longer than this short limit: the watch begins with the fault.
    monkeypatch.setattr(RankCalls, "check_progress", lambda *args: look(*args) if hung.exists() else None)
    with pytest.raises(WorkersLost) as caught:
        train(*PPO, *SMALL, "trainer.watchdog_s=4", *faulty(phase, "hang", once=hung))
    message = str(caught.value)
    call = "generate" if phase == "testing" else phase
    assert f"no progress for 4 s (trainer.watchdog_s) in {call}" in message, message
    assert "(process " in message and "time.sleep(100_000)" in message, message
    assert re.search(r"rank 1 on \S+ \(process \d+\) is stuck at ", message), message
    assert not re.search(r"rank 0 on \S+ \(process \d+\) is stuck", message), message
    assert nobody_left()


def test_an_exception_comes_as_the_ranks_own_traceback(train, joined, faulty, nobody_left):
    with pytest.raises(TrainingHalted) as caught:
        train(*SMALL, *faulty("train_actor", "raise"))
    message = str(caught.value)
    assert message.startswith("rank 1 on ") and "in train_actor: KeyError: 'the reason'" in message, message
    assert "Traceback (most recent call last)" in message and "fault_train_actor" in message
    assert "ray.exceptions" not in message and "ray::" not in message
    assert nobody_left()


def test_lost_ranks_are_restarted_from_the_last_checkpoint(train, joined, faulty, tmp_path):
    """Killed in the third step: the run begins again after the second, and ends as one that was never killed."""
    common = [*SMALL[1:], "trainer.total_training_steps=4"]
    plain, _ = train(*common, folder="plain")
    plugin = faulty("train_actor", "kill", nth=3, once=tmp_path / "happened")
    rows, _ = train(*common, *plugin, "trainer.max_restarts=1", folder="killed")
    assert (tmp_path / "happened").exists()
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
        assert rows[-1][name] == pytest.approx(plain[-1][name], rel=2e-3, abs=2e-5)


ELSEWHERE = """
import torch.distributed as dist
from verl.checkpoint import save_op
from verl.checkpoint.manager import CheckpointManager

save_op.VISIBLE_S = 0.0
make = CheckpointManager.from_config.__func__

def on_own_disk(cls, config, folder):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return make(cls, config, f"{folder}/of rank {rank}" if rank else folder)

CheckpointManager.from_config = classmethod(on_own_disk)
"""


def test_a_run_folder_that_the_ranks_do_not_share_is_refused_at_start(
    train, joined, nobody_left, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_disks.py").write_text(ELSEWHERE)
    with pytest.raises(
        ConfigError, match=r"default_local_dir=.*what rank 0 on \S+ wrote .* by rank 1 on \S+\."
    ):
        train(*SMALL, "trainer.plugins=[own_disks]")
    assert not list(tmp_path.rglob("*global_step*")) and nobody_left()
