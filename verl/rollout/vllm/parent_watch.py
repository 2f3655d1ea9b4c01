"""The processes an engine starts end with the process that started the engine, however that one ends.

vLLM's own processes notice that their parent asked them to stop, not that it was killed. Each worker therefore watches
the process named in its environment, and takes everybody between along (vLLM's engine core, a server that hangs) when
that one is gone.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from verl.rollout.weight_sync.processes import Process, between, is_alive, look

HOST = "VERL_ENGINE_HOST"


def host_of_children() -> dict[str, str]:
    """The environment by which processes know this one as the host."""
    return {HOST: f"{os.getpid()}:{_began(os.getpid())}"}


@contextmanager
def named_host() -> Iterator[None]:
    """Processes started inside, and theirs, know this one as the host."""
    os.environ.update(host_of_children())
    try:
        yield
    finally:
        del os.environ[HOST]


def end_with_host() -> None:
    """In a worker: end when the host has ended, or at once when it has already. Nothing in the host itself."""
    named = os.environ.get(HOST, "")
    if not named or not hasattr(os, "pidfd_open") or named.startswith(f"{os.getpid()}:"):
        return
    host, started = map(int, named.split(":"))
    threading.Thread(target=_watch, args=(host, started, between(host)), daemon=True).start()


def _watch(host: int, started: int, line: list[Process]) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(host)
        if is_alive(host, started):  # and not another process with the same number
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            waiting.poll()
    for process in reversed(line):
        if is_alive(process.pid, process.started):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    os._exit(1)


def _began(pid: int) -> int:
    """When a process began, in the system's ticks; 0 where that cannot be told."""
    process = look(pid)
    return process.started if process else 0
