"""The command itself with a cluster of its own: it starts Ray, and however it ends, nothing stays behind."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import SOCK_DGRAM

import psutil
import pytest

from verl.errors import ConfigError, MissingPackage
from verl.runtime import STOPPED

pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=12), pytest.mark.timeout(900)]
PATIENCE_S = 300.0


def start(arguments: list[str], log: Path, address: str = "local") -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def living() -> dict[int, tuple[int, str]]:
    """Every process that is not a zombie: its parent, and when it began (numbers are given out again)."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = int(fields[1]), fields[19]
    return found


def family(pid: int) -> dict[int, str]:
    """All living descendants of a process, and when they began."""
    everyone = living()
    found = {pid}
    while True:
        more = {child for child, (parent, _) in everyone.items() if parent in found} - found
        if not more:
            return {child: everyone[child][1] for child in found - {pid}}
        found |= more


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[bytes], log: Path) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= steps):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


def title(pid: int) -> str:
    """How a process calls itself; nothing when it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def ranks_of(family: dict[int, str]) -> dict[int, str]:
    return {pid: begun for pid, begun in family.items() if "RankProcess" in title(pid)}


def left_of(family: dict[int, str], within_s: float) -> dict[int, str]:
    """Titles of those that are still there after some time."""
    deadline = time.monotonic() + within_s
    while True:
        everyone = living()
        left = [pid for pid, begun in family.items() if everyone.get(pid, (0, ""))[1] == begun]
        if not left or time.monotonic() > deadline:
            return {pid: title(pid)[:90] for pid in left}
        time.sleep(0.2)


def reachable(pids: list[int]) -> list[str]:
    """Sockets of these processes that another host could connect or send to."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for socket in process.net_connections("inet"):
                open_to_others = socket.status == psutil.CONN_LISTEN or (
                    socket.type == SOCK_DGRAM and not socket.raddr
                )
                address = ipaddress.ip_address(socket.laddr.ip)
                if open_to_others and not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                    found.append(f"{process.name()} {socket.type.name} {socket.laddr}")
        except psutil.NoSuchProcess:
            continue
    return found


def signalled(number: int, arguments: list[str], folder: Path) -> tuple[int, dict[int, str]]:
    """Start a run, send it a signal after two steps; its exit code and all processes it had started."""
    log = folder / f"log{number:d}.txt"
    process = start([*arguments, f"trainer.default_local_dir={folder}/run{number:d}"], log)
    try:
        wait_for_steps(folder / f"run{number:d}", 2, process, log)
        started = family(process.pid)
        ranks = ranks_of(started)
        assert len(ranks) == 2
        assert reachable([process.pid, *started]) == []
        if number == signal.SIGTERM:  # as `timeout` and systemd do, to Ray's processes too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        code = process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it does not end: {log.read_text()[-3000:]}")
    finally:
        process.kill()
        process.wait()
    assert not left_of(ranks, within_s=120), number
    return code, started


def test_a_run_on_one_node_listens_on_loopback_only_and_leaves_nothing_after_a_signal(overrides, tmp_path):
    arguments = overrides("trainer.n_gpus_per_node=2", "trainer.total_training_steps=100000")
    _, killed = signalled(signal.SIGKILL, arguments, tmp_path)
    code, asked = signalled(signal.SIGTERM, arguments, tmp_path)
    assert code == STOPPED, (tmp_path / f"log{signal.SIGTERM:d}.txt").read_text()[-3000:]
    run = tmp_path / f"run{signal.SIGTERM:d}"
    saved = int((run / "latest_checkpointed_iteration.txt").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["training/global_step"] == saved >= 2
    # Ray's own helpers notice the death of their daemon by and by.
    assert not left_of(killed | asked, within_s=180)


def test_more_ranks_than_cpus_given_is_refused(overrides, monkeypatch):
    from verl.config.load import load_ppo_config
    from verl.workers.ray_cluster import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = load_ppo_config(overrides("trainer.n_gpus_per_node=3", "ray_kwargs.ray_init.num_cpus=2"))
    with pytest.raises(ConfigError, match="ray_kwargs.ray_init.num_cpus is 2, but trainer.n_gpus_per_node=3"):
        Cluster(cfg).connect()


def test_no_room_says_what_there_is(overrides, joined):
    from verl.config.load import load_ppo_config
    from verl.workers.ray_cluster import Cluster, ClusterError

    cluster = Cluster(load_ppo_config(overrides("trainer.n_gpus_per_node=3", "trainer.nnodes=3")))
    cluster.connect()
    try:
        with pytest.raises(ClusterError, match="trainer.nnodes=3 nodes with 3 CPU each are needed"):
            cluster.start_actors(1.0, "verl.workers.train_rank:TrainRank")
    finally:
        cluster.close()


def test_nodes_a_cluster_lacks_are_waited_for_briefly_and_not_in_silence(
    overrides, joined, monkeypatch, caplog
):
    from verl.config.load import load_ppo_config
    from verl.workers import ray_cluster, ray_reservation

    monkeypatch.setattr(ray_reservation, "CAPACITY_S", 3.0)
    cluster = ray_cluster.Cluster(load_ppo_config(overrides("trainer.nnodes=4")))
    cluster.connect()
    try:
        with caplog.at_level("INFO"), pytest.raises(ray_cluster.ClusterError, match="trainer.nnodes=4"):
            cluster.start_actors(100_000.0, "verl.workers.train_rank:TrainRank")
    finally:
        cluster.close()
    assert "waiting for the Ray cluster: trainer.nnodes=4" in caplog.text


def test_several_processes_are_gpus_unless_the_cpu_is_named(overrides, joined, monkeypatch):
    """trainer.device=auto once trained on CPU processes where the cluster had too few GPUs."""
    from verl.config.load import load_ppo_config
    from verl.workers import ray_cluster, ray_reservation

    monkeypatch.setattr(ray_reservation, "CAPACITY_S", 1.0)
    cluster = ray_cluster.Cluster(
        load_ppo_config(overrides("trainer.n_gpus_per_node=2", "trainer.device=auto"))
    )
    cluster.connect()
    try:
        with pytest.raises(ray_cluster.ClusterError, match="trainer.device=cpu for CPU processes"):
            cluster.start_actors(100_000.0, "verl.workers.train_rank:TrainRank")
    finally:
        cluster.close()


def test_a_term_signal_while_waiting_for_places_ends_without_stacks(overrides, joined, tmp_path):
    log = tmp_path / "log.txt"
    process = start(overrides("trainer.nnodes=4", "trainer.logger=[console]"), log, joined.address)
    try:
        while process.poll() is None and "waiting for the Ray cluster" not in log.read_text():
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert code == 143 and log.read_text().endswith("terminated\n")
    assert "SIGTERM received" not in log.read_text()


def test_without_ray_the_message_names_the_package(overrides, monkeypatch, tmp_path):
    import importlib.util

    from verl.config.load import load_ppo_config
    from verl.workers.placement import build_group

    cfg = load_ppo_config(overrides("trainer.n_gpus_per_node=2"))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(MissingPackage, match=r"trainer.n_gpus_per_node=2.*pip install 'ray"):
        build_group(cfg, None, training_steps=1, run_folder=tmp_path)
