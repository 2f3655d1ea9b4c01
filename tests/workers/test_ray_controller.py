"""The controller is killed in every kind of phase: its ranks do not outlive it.

A rank is idle, generates, passes forward, updates, takes new weights or saves; which model it does so with (actor,
reference, critic) makes no difference to a call whose caller is gone.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

_spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
assert _spec and _spec.loader
faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)

PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.optim.lr=1e-3"]
OWN = ["testing", "adv"]
"""Phases in which the controller works itself; in the others a rank kills it, in the middle of a call."""
CALLS = ["generate", "log_probs", "train_actor", "publish", "save"]


@pytest.mark.parametrize("phase", [*OWN, *CALLS])
def test_ranks_do_not_outlive_a_killed_controller(
    phase, overrides, joined, session_folder, digits_data, tmp_path
):
    note, log = tmp_path / "controller", tmp_path / "log.txt"
    if phase in OWN:
        plugin = faults.write(tmp_path, phase, "kill", controller=True)
    else:
        plugin = faults.write(tmp_path, phase, "kill the other", note=note, once=tmp_path / "happened")
    settings = [
        *PPO,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        f"data.val_files={digits_data}/val.jsonl",
        f"trainer.plugins=[{plugin}]",
    ]
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as output:
        controller = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(*settings)],
            env={**os.environ, "PYTHONPATH": search},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    note.write_text(str(controller.pid))
    try:
        code = controller.wait(timeout=500)
    finally:
        controller.kill()
        controller.wait()
    assert code == -signal.SIGKILL, log.read_text(errors="replace")[-4000:]
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 60)
