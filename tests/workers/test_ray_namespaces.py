"""Two nodes with addresses of their own: network namespaces joined by a cable, which is then pulled."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.components

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 6417


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


class Nodes:
    """Two namespaces and the Ray node in each."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"verl{os.getpid()}{side}" for side in "ab"]
        self.links = [f"vl{os.getpid() % 100000}{side}" for side in "ab"]
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def start_ray(self) -> None:
        common = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        for side, own in enumerate((head, [f"--address={ADDRESSES[0]}:{PORT}"])):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *common]
            command.append(f"--node-ip-address={ADDRESSES[side]}")
            self.processes.append(self.run(side, command, self.folder / f"node{side}.log"))
            time.sleep(8 if side == 0 else 4)

    def run(self, side: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME")}
        # Every process of a cluster needs the same token; without one Ray makes up its own on each node.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        environment["RAY_ADDRESS"] = f"{ADDRESSES[0]}:{PORT}" if "start" not in command else ""
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[side], *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def pull_the_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def close(self) -> None:
        for name in self.names:
            for pid in ip("netns", "pids", name).split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in self.processes:
            process.wait(timeout=30)
        for name in self.names:
            ip("netns", "del", name)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    # Not below pytest's folder: a socket's path has at most 107 characters.
    folder = Path(f"/tmp/verlns{os.getpid()}")
    folder.mkdir()
    found = Nodes(folder)
    try:
        try:
            found.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr}")
        found.start_ray()
        yield found
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_two_addresses_one_result_and_a_pulled_cable(nodes, train, overrides, tmp_path):
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean")
    alone, _ = train("trainer.total_training_steps=3", folder="alone")
    log = tmp_path / "log.txt"
    settings = [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.watchdog_s=90",
        "trainer.save_freq=1",
    ]
    arguments = overrides(*settings, "trainer.total_training_steps=100000")
    run = nodes.run(0, [sys.executable, "-m", "verl.trainer.main_ppo", *arguments], log)
    nodes.processes.append(run)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert run.poll() is None, log.read_text()[-3000:]
        time.sleep(0.2)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[:3]]
    for mine, one in zip(rows, alone, strict=True):
        for name in names:
            assert mine[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name

    nodes.pull_the_cable()
    code = run.wait(timeout=240)
    message = log.read_text()
    assert code == 3, message[-3000:]
    # Which rank sits on which node is Ray's choice.
    assert re.search(r"rank [01] on ", message) and "trainer.resume_mode=auto" in message

    saved = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    rows, _ = train("trainer.save_freq=1", f"trainer.total_training_steps={saved + 1}")
    assert [row["training/global_step"] for row in rows] == list(range(1, saved + 2))
