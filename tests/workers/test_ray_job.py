"""A command that Ray runs as a job: it knows that it is one, and is given the time it asked for when it is stopped."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl.http_server import free_port

pytest.importorskip("ray", reason="needs Ray (make test-components)")
pytestmark = [
    pytest.mark.components,
    pytest.mark.extended,
    pytest.mark.slow(seconds=60),
    pytest.mark.timeout(900),
]

RAY = str(Path(sys.executable).parent / "ray")
JOB = """
import logging, os, pathlib, signal, sys, threading, time
logging.basicConfig(stream=sys.stdout)
from verl.runtime import stop_on_signal
stopped = threading.Event()
class Loop:
    def request_stop(self): stopped.set()
with stop_on_signal() as stop, stop.stops(Loop()):
    pathlib.Path(sys.argv[1]).touch()
    while not stopped.wait(0.1): pass
    time.sleep(5)  # longer than Ray's default of 3
    pathlib.Path(sys.argv[2]).touch()
"""


@pytest.fixture
def short_path() -> Iterator[str]:
    """Ray's sockets do not fit into pytest's own folders."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield path


@pytest.fixture
def ray_command(tmp_path: Path, short_path: str) -> Iterator[Callable[..., str]]:
    """Runs `ray job ...` on a cluster of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    port, dashboard = free_port(), free_port()
    command = [
        RAY,
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=1",
    ]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += ["--object-store-memory=100000000", f"--temp-dir={short_path}"]
    with (tmp_path / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def run(*arguments: str) -> str:
        line = [RAY, "job", arguments[0], "--address", f"http://127.0.0.1:{dashboard}", *arguments[1:]]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
        return done.stdout if done.returncode == 0 else f"failed: {done.stderr}"

    try:
        wait_until(lambda: head.poll() is not None or not run("list").startswith("failed"))
        assert head.poll() is None, (tmp_path / "head.log").read_text()
        yield run
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()


def wait_until(reached: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_stopped_job_has_the_time_that_its_environment_gives_it(
    ray_command: Callable[..., str], tmp_path: Path
) -> None:
    script, began, ended = tmp_path / "job.py", tmp_path / "began", tmp_path / "ended"
    script.write_text(JOB)
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "RAY_JOB_STOP_WAIT_TIME_S": "59"}
    numbers = itertools.count()

    def submit() -> str:
        """The job's id; empty where the cluster has not begun to take jobs, or could not start this one."""
        job = f"job_{next(numbers)}"
        told = ray_command(
            "submit", "--submission-id", job, "--no-wait", "--runtime-env-json", json.dumps({"env_vars": variables}),
            "--", sys.executable, str(script), str(began), str(ended),
        )  # fmt: skip
        if told.startswith("failed"):
            return ""
        wait_until(lambda: began.exists() or "FAILED" in ray_command("status", job).upper())
        return job if began.exists() else ""

    job = next(filter(None, (submit() for _ in range(3))))
    ray_command("stop", job)
    assert "kills this run 59 s after" in ray_command("logs", job)
    assert ended.exists()
