"""A Ray worker in a process forked from one that has torch imported (tests/fork_server.py).

Ray starts this file in place of its default_worker.py. It asks the fork server for a process that runs it again, this
time as the worker, and stays until that one ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import socket
import sys
from pathlib import Path

SERVER = "VERL_TEST_FORK_SERVER"
RAYLET = "VERL_TEST_RAYLET"
"""The daemon that started this worker; it is not the parent of the forked process."""


def ask() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SERVER])
        job = {
            "program": __file__,
            "arguments": sys.argv[1:],
            "environment": {**os.environ, RAYLET: str(os.getppid())},
        }
        socket.send_fds(server, [json.dumps(job).encode() + b"\n"], [0, 1, 2])
        while server.recv(100):
            pass


def work() -> None:
    raylet = int(os.environ.pop(RAYLET))

    def parent() -> int:
        """As for any worker of Ray: the daemon of its node, and another process when that has ended."""
        try:
            state = Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 1
        return 1 if state == "Z" else raylet

    os.getppid = parent
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.submodule_search_locations
    (folder,) = spec.submodule_search_locations
    sys.path.pop(0)  # this file's folder
    runpy.run_path(str(Path(folder) / "_private/workers/default_worker.py"), run_name="__main__")


if __name__ == "__main__":
    if RAYLET in os.environ:
        work()
    else:
        ask()
