"""Ctrl-C, SIGTERM and SIGHUP: heard, answered, obeyed at once the second time, and not forgotten by a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import tiny_run
from verl import runtime
from verl.config.schema import PPOConfig
from verl.errors import EngineLost, RayStartError, TrainingHalted, VerlError, WorkersLost
from verl.runtime import STOPPED, StopRequest, run_command, stop_on_signal
from verl.trainer.main_ppo import RunResult, exit_code, main
from verl.workers import placement
from verl.workers.placement import with_restarts

pytestmark = pytest.mark.usefixtures("heard_signals")
STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Loop:
    asked = 0

    def request_stop(self) -> None:
        self.asked += 1


@pytest.fixture
def every_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a request, however soon after another."""
    monkeypatch.setattr(runtime, "SAME_REQUEST_S", 0.0)


@pytest.mark.parametrize(
    ("in_job", "wait", "short"),
    [
        (True, None, "3"),
        (True, "30", "30"),
        (True, "soon", "soon"),
        (True, "600", None),
        (False, None, None),
        (False, "3", None),
    ],
)
def test_a_ray_job_that_is_killed_soon_after_its_stop_is_warned_of(
    in_job: bool,
    wait: str | None,
    short: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in (
        ("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}" if in_job else None),
        ("RAY_JOB_STOP_WAIT_TIME_S", wait),
    ):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with stop_on_signal():
        pass
    if short is None:
        assert not caplog.text
    else:
        assert f"kills this run {short} s after" in caplog.text and "RAY_JOB_STOP_WAIT_TIME_S" in caplog.text


@pytest.mark.parametrize("number", STOPS)
def test_the_first_signal_is_answered_and_the_second_ends_at_once(
    number: signal.Signals, every_signal: None, caplog: pytest.LogCaptureFixture
) -> None:
    loop, before = Loop(), [signal.getsignal(each) for each in STOPS]
    with pytest.raises(KeyboardInterrupt), stop_on_signal() as stop, stop.stops(loop):
        os.kill(os.getpid(), number)
        assert loop.asked == 1 and stop.asked
        assert f"{number.name}: stopping after this step, with a checkpoint" in caplog.text
        os.kill(os.getpid(), number)
        raise AssertionError("the second signal was not heard")
    assert loop.asked == 1
    assert [signal.getsignal(each) for each in STOPS] == before


def test_signals_of_one_request_count_once() -> None:
    """`timeout` sends SIGTERM to the command and to its process group, systemd SIGHUP after SIGTERM."""
    loop = Loop()
    with stop_on_signal() as stop, stop.stops(loop):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
    assert loop.asked == 1


@pytest.mark.parametrize("number", STOPS)
def test_a_command_without_a_loop_ends_at_once_with_the_signals_code(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> int:
        with stop_on_signal():
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None  # as a call into Ray does
        return 0

    assert run_command(body) == 128 + number
    assert capsys.readouterr().err == ("interrupted\n" if number == signal.SIGINT else "terminated\n")


@pytest.mark.parametrize("rest", ["threading.Thread(target=wait).start()", "atexit.register(wait)"])
def test_ctrl_c_while_the_process_ends_is_one_line_and_the_commands_code(rest: str) -> None:
    code = f"""
import atexit, sys, threading, time
from verl.runtime import run_command
def wait():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("waits", flush=True)
    time.sleep(60)
def body():
    {rest}
    return 75
sys.exit(run_command(body))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    assert (said, process.returncode) == ("interrupted at the end\n", 75)


def test_nohup_keeps_a_run_from_hanging_up() -> None:
    code = (
        "import os, signal\n"
        "from verl.runtime import run_command, stop_on_signal\n"
        "def body():\n"
        "    with stop_on_signal() as stop:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        return 0\n"
        "raise SystemExit(run_command(body))\n"
    )
    for prefix, status in (["nohup"], 0), ([], 129):
        done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, timeout=120)
        assert done.returncode == status, done.stderr


@pytest.mark.parametrize("lost", [WorkersLost("rank 1 died"), EngineLost("the engine died")])
def test_after_a_stop_was_asked_for_a_loss_ends_the_run(lost: VerlError) -> None:
    cfg, starts = PPOConfig(), []
    cfg.trainer.max_restarts = 3

    def body() -> None:
        starts.append(len(starts))
        with stop.stops(Loop()):
            os.kill(os.getpid(), signal.SIGTERM)
            raise lost

    with pytest.raises(type(lost)), stop_on_signal() as stop:
        with_restarts(cfg, body, stop)
    assert starts == [0]


def test_without_a_stop_a_loss_is_followed_by_a_restart() -> None:
    cfg, starts = PPOConfig(), []
    cfg.trainer.max_restarts = 2

    def body() -> int:
        starts.append(len(starts))
        if len(starts) < 3:
            raise EngineLost("the engine died")
        return 7

    assert with_restarts(cfg, body, StopRequest()) == 7 and len(starts) == 3


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    """The config of a run whose restarts find the cluster as it was."""
    monkeypatch.setattr(placement, "_fit", lambda cfg: None)
    cfg = PPOConfig()
    cfg.trainer.max_restarts, cfg.trainer.n_gpus_per_node = 2, 2
    return cfg


def test_a_restart_in_which_ray_does_not_start_counts_as_one(
    two_ranks: PPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[Any] = [WorkersLost("rank 1 died"), RayStartError("Ray could not be started"), 7]

    def body() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return int(outcome)

    assert with_restarts(two_ranks, body, StopRequest()) == 7
    assert "restart 1 failed: Ray could not be started" in caplog.text
    outcomes[:] = [WorkersLost("rank 1 died"), RayStartError("no 1"), RayStartError("no 2"), 7]
    with pytest.raises(WorkersLost, match=r"rank 1 died\nrestart 1 failed: no 1\nrestart 2 failed: no 2$"):
        with_restarts(two_ranks, body, StopRequest())
    assert outcomes == [7]


def test_ray_that_does_not_start_at_first_is_an_error_at_once(two_ranks: PPOConfig) -> None:
    starts = []

    def body() -> None:
        starts.append(0)
        raise RayStartError("the Ray cluster at RAY_ADDRESS=nowhere could not be joined")

    with pytest.raises(RayStartError):
        with_restarts(two_ranks, body, StopRequest())
    assert len(starts) == 1


def test_a_run_that_fits_no_node_that_is_left_ends_with_the_loss(
    two_ranks: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(cfg: PPOConfig) -> None:
        raise VerlError("the cluster is too small for the run")

    def body() -> None:
        raise WorkersLost("rank 1 died")

    monkeypatch.setattr(placement, "_fit", no_room)
    with pytest.raises(TrainingHalted, match="rank 1 died\nThe run cannot be restarted: the cluster is too"):
        with_restarts(two_ranks, body, StopRequest())


def test_a_stopped_run_has_an_exit_code_of_its_own(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code(RunResult(tmp_path, {}, 4)) == 0 and not caplog.text
    assert exit_code(RunResult(tmp_path, {}, 3, stopped=True)) == STOPPED == 75
    assert "stopped after step 3, not the last one: the same command resumes" in caplog.text
    assert "Exit code 75" in caplog.text


@pytest.mark.parametrize(("last_step", "code"), [(5, STOPPED), (2, 0)])
def test_a_run_stopped_by_a_signal_saves_its_step_and_says_so(
    last_step: int, code: int, tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """In step 2; a run whose last step that is has finished."""
    from verl.trainer.loop import RLLoop

    step = RLLoop.step

    def hung_up(loop: RLLoop) -> dict[str, float]:
        if loop.step_number == 2:
            os.kill(os.getpid(), signal.SIGHUP)
        return step(loop)

    monkeypatch.setattr(RLLoop, "step", hung_up)
    words = tiny_run(
        tiny_model_dir, digits_data, f"trainer.total_training_steps={last_step}", folder=tmp_path / "run"
    )
    assert main(words) == code
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
