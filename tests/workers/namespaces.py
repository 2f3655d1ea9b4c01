"""Two network namespaces joined by a cable, with a Ray node in each: two machines as far as any socket can tell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 6417
HEAD = f"{ADDRESSES[0]}:{PORT}"
PATIENCE_S = 500.0
"""For anything that a machine with other work to do may be slow at."""

BOTH_ALIVE = """
import time, ray
while True:
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        break
    except Exception:
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.5)
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


class NotAllowed(Exception):
    """Network namespaces cannot be had here."""


class Nodes:
    """Two namespaces, and the processes in each. `folder` must have a short name: sockets live in it."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"verl{os.getpid()}{side}" for side in "ab"]
        self.links = [f"vl{os.getpid() % 100000}{side}" for side in "ab"]
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NotAllowed("network namespaces need root and iproute2")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            raise NotAllowed(f"network namespaces are not allowed here: {error.stderr.strip()}") from error

    def _make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            # It mounts /sys anew, which some containers forbid although they allow the rest.
            ip("netns", "exec", name, "true")
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def start_ray(self) -> None:
        common = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        for side, own in enumerate((head, [f"--address={HEAD}"])):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *common]
            log = self.folder / f"node{side}.log"
            node = self.run(side, [*command, f"--node-ip-address={ADDRESSES[side]}"], log)
            if side == 0:
                wait_until(self.head_answers, node, log)
        said = self.folder / "both.log"
        both = self.run(0, [sys.executable, "-c", BOTH_ALIVE], said)
        try:
            wait_until(lambda: both.poll() == 0, both, said)
        except AssertionError as error:
            raise AssertionError(f"{error}\nThe second node:\n{end_of(log)}") from error

    def run(self, side: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """A process in one of the namespaces."""
        # Every process of a cluster needs the same token; without one Ray makes up its own on each node.
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_ADDRESS": HEAD}
        if "start" in command:
            del own["RAY_ADDRESS"]
        environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[side], *command],
                env={**environment, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def head_answers(self) -> bool:
        words = ["netns", "exec", self.names[0], "bash", "-c", f"exec 3<>/dev/tcp/{ADDRESSES[0]}/{PORT}"]
        return subprocess.run(["ip", *words], capture_output=True, timeout=60).returncode == 0

    def pull_the_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def close(self) -> None:
        """End all that runs in the namespaces, then the namespaces. What was never made is no error."""
        if shutil.which("ip") is None:
            return
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=60)
            for pid in found.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60)
        # Where they were not yet moved into a namespace, which takes them with it.
        subprocess.run(["ip", "link", "del", self.links[0]], capture_output=True, timeout=60)


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes] | None, log: Path) -> None:
    """Poll; when it takes too long, or the process ends before, say so with the end of its log."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        code = process.poll() if process is not None else None
        if code is not None:
            raise AssertionError(f"the process ended with {code}; the end of its log:\n{end_of(log)}")
        if time.monotonic() > deadline:
            raise AssertionError(f"not reached in {PATIENCE_S:g} s; the end of the log:\n{end_of(log)}")
        time.sleep(0.2)


def end_of(log: Path, characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else "(no log)"
