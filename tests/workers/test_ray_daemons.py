"""Ray's own processes: one that dies is noticed, a start that fails is an error of ours and leaves none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from verl.errors import RayStartError, WorkersLost

pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of the GCS of a cluster that was started here."""
    from verl.workers import ray_daemons

    process = subprocess.Popen(["sleep", "1000"])
    node = SimpleNamespace(all_processes={"gcs_server": [SimpleNamespace(process=process)]})
    monkeypatch.setattr(ray_daemons.ray_worker, "_global_node", node)
    yield process
    process.kill()
    process.wait()


def test_calls_miss_a_daemon_of_their_own_cluster_at_once(gcs: Any) -> None:
    from verl.workers.ray_calls import RankCalls

    calls = RankCalls([], 600.0)
    calls.names = ["rank 0"]
    calls._check_others("train_actor")
    gcs.kill()
    gcs.wait()
    calls._checked = 0.0
    with pytest.raises(WorkersLost) as caught:
        calls.ready("train_actor", {"an answer that never comes": 0})
    assert str(caught.value).startswith(
        f"Ray's gcs_server (process {gcs.pid}) ended with status -9, in train_actor: the run's cluster is lost."
    )
    assert "the same command resumes" in str(caught.value) and calls.broken


def test_a_head_elsewhere_may_be_silent_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers import ray_daemons

    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(ray_daemons.ray, "get_runtime_context", lambda: context)
        health = ray_daemons.ClusterHealth()
        assert health.problem() == "" and ray_daemons.head_answers()
    assert health.problem() == "" and not ray_daemons.head_answers()
    monkeypatch.setattr(ray_daemons, "HEAD_S", 0.0)
    assert health.problem() == f"the head of the Ray cluster at {address} has not answered for 0 s"


def test_processes_that_ray_starts_do_not_get_the_signals_of_a_stop() -> None:
    from verl.workers.ray_daemons import signals_kept

    with signals_kept():
        child = subprocess.Popen(["sleep", "1000"])
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_rank_outlives_them_and_what_it_starts_does_not() -> None:
    code = (
        "import os, signal, subprocess\n"
        "from verl.workers.ray_daemons import outlive_signals, signals_kept, unblock_signals\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})\n"  # as it inherits them
        "outlive_signals()\n"
        "unblock_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "child.terminate()\n"
        "assert child.wait(60) == -signal.SIGTERM\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_cluster_that_cannot_be_joined_is_named(overrides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from verl.config.load import load_ppo_config
    from verl.workers.ray_cluster import Cluster

    def refused(**_: Any) -> None:
        raise ConnectionError("Connection refused")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(
        RayStartError, match=r"cluster at RAY_ADDRESS=127.0.0.1:1 could not be joined: Connection"
    ):
        Cluster(load_ppo_config(overrides("trainer.n_gpus_per_node=2"))).connect()


_FAILED_START = """
import os, sys
import pytest, ray
from ray._private import services
from verl.config.load import load_ppo_config
from verl.errors import RayStartError
from verl.processes import descendants
from verl.workers.ray_cluster import Cluster

def slow(*_, **__):
    raise Exception("The current node timed out during startup.")

real, services.get_node = services.get_node, slow
cfg = load_ppo_config(sys.argv[1:])
with pytest.raises(RayStartError, match="Ray could not be started: The current node timed out") as caught:
    Cluster(cfg).connect()
assert "ray_kwargs.ray_init.num_cpus=" in str(caught.value) and not ray.is_initialized()
left = [process.name() for process in descendants(os.getpid())]
assert not {"gcs_server", "raylet"} & set(left), left

services.get_node = real  # a restart starts another one
cluster = Cluster(cfg)
cluster.connect()

@ray.remote
class Rank:
    def answer(self):
        return 7

assert ray.get(Rank.remote().answer.remote()) == 7
cluster.close()
"""


@pytest.mark.slow(seconds=10)
def test_a_start_of_ray_that_fails_is_an_error_of_ours_and_leaves_no_process(overrides: Any) -> None:
    """Ray raises a plain Exception where its processes take long to start. In a process of its own: what such a start
    leaves in Ray's library must not reach other tests."""
    words = [sys.executable, "-c", _FAILED_START, *overrides("trainer.n_gpus_per_node=2")]
    done = subprocess.run(
        words, env={**os.environ, "RAY_ADDRESS": "local"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
