"""The controller is killed in a phase of each kind: neither its ranks nor its reward workers outlive it."""

from __future__ import annotations

import signal

import pytest

from tests.workers import faults
from tests.workers.faults import PPO

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

OWN = ["testing", "reward", "adv"]
"""Phases in which the controller works itself; in the others a rank kills it, in the middle of a call."""
IN_CALLS = ["generate", "log_probs", "train_actor", "update_weights", "save"]
"""A call with results in parts, a forward pass, an update, a call without a result, and files."""
MARK = "VERL_TEST_RUN"
"""What a controller starts by itself carries this in its environment."""


@pytest.mark.parametrize("phase", faults.extended([*OWN, *IN_CALLS], ["reward", "generate", "save"]))
def test_nobody_outlives_a_killed_controller(
    phase, overrides, joined, session_folder, digits_data, tmp_path, fork_server
):
    note, log = tmp_path / "controller", tmp_path / "log.txt"
    if phase in OWN:
        plugin = faults.write(tmp_path, phase, "kill", controller=True)
    else:
        plugin = faults.write(tmp_path, phase, "kill the other", note=note, once=tmp_path / "happened")
    settings = [
        *PPO,
        "reward.in_process=False",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        f"data.val_files={digits_data}/val.jsonl",
        f"trainer.val_before_train={phase == 'testing'}",
        f"trainer.plugins=[{plugin}]",
    ]
    mark = f"{MARK}={tmp_path}"
    controller = fork_server.start(
        "verl.trainer.main_ppo",
        overrides(*settings),
        output=log,
        environment={MARK: str(tmp_path), "PYTHONPATH": str(tmp_path)},
    )
    note.write_text(str(controller.pid))
    try:
        assert faults.wait_for(lambda: faults.marked(mark) or controller.poll() is not None, 400)
        helpers = faults.marked(mark)
        code = controller.wait(timeout=500)
    finally:
        controller.kill()
    assert code == -signal.SIGKILL, log.read_text(errors="replace")[-4000:]
    assert helpers, "reward workers are its own children"
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 240)
    assert faults.wait_for(lambda: not faults.marked(mark), 240), faults.marked(mark)
