"""One process on Ray: an `RPCServer` behind a Ray actor, with a second lane for control calls and a third for calls
that a generation stream serves."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from verl.observe.live import live
from verl.workers.ray_daemons import outlive_signals, unblock_signals
from verl.workers.rpc_server import Outcome

PARENT_S = 1.0


def _end_with(parent: int) -> None:
    """Ray asks an actor to end with the daemon of its node and then waits for its call, which may hang forever. A
    process whose parent ended has another one."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


class RankProcess:
    """Hosts the server that `server` names as `module:Class`. Calls come with the driver's training step, to which the
    phases of this process belong."""

    def __init__(self, server: str, rank: int, world_size: int, threads: int | None) -> None:
        if threads is not None:
            # Ray gives a worker one thread. OpenMP reads this when torch is imported, which `server` does.
            os.environ["OMP_NUM_THREADS"] = str(threads)
        outlive_signals()
        threading.Thread(target=_end_with, args=(os.getppid(),), name="verl-parent", daemon=True).start()
        module, _, name = server.partition(":")
        self._server = getattr(importlib.import_module(module), name)(rank, world_size)

    @staticmethod
    def _begin(step: int) -> None:
        unblock_signals()
        live.begin_step(step)

    def serve(self, step: int, label: str, call: str, *args: Any) -> Outcome:
        self._begin(step)
        if call == "handshake":
            args = (ray.util.get_node_ip_address(), os.path.realpath("/proc/self/fd/2"))
        outcome: Outcome = self._server.serve(call, *args, label=label)
        return outcome

    def stream(self, step: int, call: str, *args: Any) -> Iterator[Outcome]:
        self._begin(step)
        yield from self._server.stream(call, *args)

    @ray.method(concurrency_group="between_polls")
    def serve_between_polls(self, step: int, label: str, call: str, *args: Any) -> Outcome:
        self._begin(step)
        outcome: Outcome = self._server.serve_between_polls(call, *args)
        return outcome

    @ray.method(concurrency_group="control")
    def control(self, call: str, *args: Any) -> Any:
        return getattr(self._server, f"control_{call}")(*args)


def remote_rank_process() -> Any:
    remote: Any = ray.remote  # its annotations do not know concurrency groups
    groups = {"control": 1, "between_polls": 1}
    return remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0)(RankProcess)
