"""What vLLM changes about the process it runs in, and the processes it starts.

vLLM's processes notice that their parent asked them to stop, not that it was killed. Each worker therefore watches the
process named in its environment, and kills everybody in between (the engine core, a server that hangs) when it is gone.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import torch

from verl.errors import RESUME, EngineLost
from verl.processes import ancestors_up_to, describe, is_alive, start_time, wait_gone

HOST = "VERL_ENGINE_HOST"
SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"


def host_environment() -> dict[str, str]:
    """The environment by which an engine's processes know this one as their host."""
    return {HOST: f"{os.getpid()}:{start_time(os.getpid())}"}


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables while the context lasts; the old values are restored."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def end_with_host() -> None:
    """In a worker: end when the host has ended. Nothing in the host itself."""
    named = os.environ.get(HOST, "")
    if not named or not hasattr(os, "pidfd_open") or named.startswith(f"{os.getpid()}:"):
        return
    host, started = map(int, named.split(":"))
    threading.Thread(target=_watch, args=(host, started, ancestors_up_to(host)), daemon=True).start()


def _watch(host: int, started: int, between: list[psutil.Process]) -> None:
    wait_gone(host, started)
    for process in reversed(between):
        with suppress(psutil.Error):
            process.kill()
    os._exit(1)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """vLLM seeds the process's generators while it starts; the trainer's are restored."""
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)


class EngineProcesses:
    """vLLM's engine core and workers, started by this process. Their output goes to this process's output."""

    name = "vLLM's engine"

    def __init__(self, pids: Iterable[int]) -> None:
        self._started = {pid: start_time(pid) for pid in sorted(set(pids) - {os.getpid()})}

    @property
    def pids(self) -> list[int]:
        return list(self._started)

    def check(self) -> None:
        ended = [str(pid) for pid, started in self._started.items() if not is_alive(pid, started)]
        if ended:
            raise EngineLost(
                f"{self.name} died: of its processes {', '.join(map(str, self.pids))} these have ended: "
                f"{', '.join(ended)}. Their log is above in this process's output; {RESUME}."
            )

    def describe(self) -> str:
        return ", ".join(map(describe, self.pids))

    def log_tail(self) -> str:
        return ""

    def kill(self) -> None:
        for pid, started in self._started.items():
            if is_alive(pid, started):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def destroy_process_groups() -> None:
    """End the process groups vLLM created here, so that another engine can start."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
