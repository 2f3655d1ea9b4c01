"""The controller is killed in every phase of a step: neither its ranks nor its reward workers outlive it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

_spec = importlib.util.spec_from_file_location("faults", Path(__file__).with_name("faults.py"))
assert _spec and _spec.loader
faults = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)

PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "critic.optim.lr=1e-3"]
OWN = ["testing", "reward", "adv"]
"""Phases in which the controller works itself; in the others a rank kills it, in the middle of a call."""
CALLS = ["generate", "log_probs", "ref_log_probs", "values", "train_critic", "train_actor", "publish", "save"]
MARK = "VERL_TEST_RUN"
"""What a controller starts by itself carries this in its environment."""


class Forker:
    """Starts controllers, one after the other."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("forking.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log

    def start(self, **job: Any) -> tuple[int, Callable[[], int]]:
        """The controller's process, and how to wait for its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer(), self._answer

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text(errors="replace")[-4000:]
        return int(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def forker(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    made = Forker(tmp_path_factory.mktemp("forker") / "log.txt")
    yield made
    made.close()


@pytest.mark.parametrize("phase", [*OWN, *CALLS])
def test_nobody_outlives_a_killed_controller(
    phase, overrides, joined, session_folder, digits_data, tmp_path, forker
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
    controller, ended = forker.start(
        arguments=overrides(*settings),
        environment={"RAY_ADDRESS": os.environ["RAY_ADDRESS"], MARK: str(tmp_path)},
        search=str(tmp_path),
        log=str(log),
    )
    note.write_text(str(controller))
    # Whatever happens here, the forker can go on.
    late = threading.Timer(500, os.kill, (controller, signal.SIGTERM))
    late.start()
    try:
        assert faults.wait_for(lambda: faults.marked(mark) or not faults.lives(controller), 400)
        helpers = faults.marked(mark)
        code = ended()
    finally:
        late.cancel()
    assert code == -signal.SIGKILL, log.read_text(errors="replace")[-4000:]
    assert helpers, "reward workers are its own children"
    assert faults.wait_for(lambda: not faults.rank_processes(session_folder), 60)
    assert faults.wait_for(lambda: not faults.marked(mark), 60), faults.marked(mark)
