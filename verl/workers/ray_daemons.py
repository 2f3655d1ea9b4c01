"""Ray's own processes: how they are started, ended and watched; and the process of a rank, which Ray starts.

Those of a cluster that this process starts (raylet, GCS, agents) have SIGTERM and SIGHUP blocked, so that a signal to
the process group or to everything of a service (`timeout`, systemd, a closed terminal) leaves them for the step and
its checkpoint. They are ended with SIGKILL, by this process or, when it dies, by the kernel.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from verl.observe.live import live
from verl.processes import kill_tree

HEAD_S = 45.0
"""How long the head of a cluster that others started may not answer, which may be restarted meanwhile. After 60 s Ray
ends this process."""
_CONNECT_S = 1.0
_KILLED_S = 10.0
_PARENT_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_VITAL = ("gcs_server", "raylet")


@contextmanager
def signals_kept() -> Iterator[None]:
    """Around `ray.init`: processes it starts do not get SIGTERM and SIGHUP, and our handler of SIGTERM is not replaced
    by one that writes C++ stacks. A signal that comes meanwhile is handled at the end."""
    handler = signal.getsignal(signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def outlive_signals() -> None:
    """In the main thread of a process that Ray started: where it has the signals blocked (see above), it hears and
    ignores them instead, so that programs it starts get them as usual."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)


def unblock_signals() -> None:
    """In a thread that may start programs: they inherit its mask."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def on_loopback() -> Iterator[None]:
    """A cluster that is started meanwhile has the node address 127.0.0.1, to which all its processes then bind. Ray
    replaces that address by the network's when it is given by `_node_ip_address`, except where clusters of several
    nodes are switched off, as they are by default on macOS."""
    several_nodes = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_nodes


def _own_processes() -> dict[str, list[Any]]:
    """Of the cluster this process started, by kind; empty where it joined one."""
    node = ray_worker._global_node
    return {} if node is None else node.all_processes


def kill_at_shutdown() -> None:
    """Ray would ask each process to end and wait a second for it, in vain: `ray.shutdown` kills them, with what they
    started."""
    node: Any = ray_worker._global_node
    remove = node.kill_all_processes

    def kill(**options: Any) -> None:
        kill_daemons()
        remove(**options)

    node.kill_all_processes = kill


def kill_daemons() -> None:
    for started in list(_own_processes().values()):
        for each in started:
            kill_tree(each.process.pid)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


def kill_new_daemons(before: set[int]) -> None:
    """Those of a start that failed, of which Ray keeps no record; `before` are the children there were."""
    package, killed = os.path.dirname(ray.__file__), []
    for pid in children() - before:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if any(word.startswith(package) for word in process.cmdline()):
                kill_tree(pid)
                killed.append(process)
    psutil.wait_procs(killed, timeout=_KILLED_S)


def lost_daemon() -> str:
    """Which process of a cluster started here has died, in words; empty: none."""
    for kind in _VITAL:
        for each in _own_processes().get(kind, ()):
            status = each.process.poll()
            if status is not None:
                return f"Ray's {kind} (process {each.process.pid}) ended with status {status}"
    return ""


def head_answers() -> bool:
    """Whether Ray's control service (GCS) can be reached: what needs it waits for it, and after a while Ray ends the
    process that waits."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


def ray_lost() -> bool:
    """Whether nothing may be asked of Ray any more."""
    return bool(lost_daemon()) or not head_answers()


class ClusterHealth:
    """Notices, between two calls to ranks, that Ray itself is gone."""

    def __init__(self) -> None:
        self._silent_since: float | None = None

    def problem(self) -> str:
        """In words; empty: none."""
        dead = lost_daemon()
        if dead or _own_processes():
            return dead
        if head_answers():
            self._silent_since = None
            return ""
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since < HEAD_S:
            return ""
        address = ray.get_runtime_context().gcs_address
        return f"the head of the Ray cluster at {address} has not answered for {HEAD_S:.0f} s"


def _end_with_parent() -> None:
    """Ray asks an actor to end with the daemon of its node and then waits for its call, which may hang forever. A
    process whose parent ended has another one."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os._exit(1)


class RankProcess:
    """An `RPCServer`, which `server` names as `module:Class`, behind a Ray actor, with a second lane for control calls
    and a third for calls that a generation stream serves. Calls come with the driver's training step, to which the
    phases of this process belong; they are answered with an `CallOutcome`."""

    def __init__(self, server: str, rank: int, world_size: int, threads: int | None) -> None:
        if threads is not None:
            # Ray gives a worker one thread. OpenMP reads this when torch is imported, which `server` does.
            os.environ["OMP_NUM_THREADS"] = str(threads)
        outlive_signals()
        threading.Thread(target=_end_with_parent, name="verl-parent", daemon=True).start()
        module, _, name = server.partition(":")
        self._server: Any = getattr(importlib.import_module(module), name)(rank, world_size)

    @staticmethod
    def _begin(step: int) -> None:
        unblock_signals()
        live.begin_step(step)

    def serve(self, step: int, label: str, call: str, *args: Any) -> Any:
        self._begin(step)
        if call == "handshake":
            args = (ray.util.get_node_ip_address(), os.path.realpath("/proc/self/fd/2"))
        return self._server.serve(call, *args, label=label)

    def stream(self, step: int, call: str, *args: Any) -> Iterator[Any]:
        self._begin(step)
        yield from self._server.stream(call, *args)

    @ray.method(concurrency_group="between_polls")
    def serve_between_polls(self, step: int, label: str, call: str, *args: Any) -> Any:
        self._begin(step)
        return self._server.serve_between_polls(call, *args)

    @ray.method(concurrency_group="control")
    def control(self, call: str, *args: Any) -> Any:
        return getattr(self._server, f"control_{call}")(*args)


def remote_rank_process() -> Any:
    remote: Any = ray.remote  # its annotations do not know concurrency groups
    groups = {"control": 1, "between_polls": 1}
    return remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0)(RankProcess)
