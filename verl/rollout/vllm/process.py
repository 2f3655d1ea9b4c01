"""What vLLM changes about the process it runs in, kept or put back; and the processes it starts itself."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from verl.errors import RESUME, EngineLost
from verl.rollout.weight_sync import processes

SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"


@contextmanager
def kept_random_state() -> Iterator[None]:
    """vLLM seeds the process's generators while it starts; the trainer's go on where they were."""
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


@contextmanager
def sockets_in(folder: Path) -> Iterator[None]:
    """An engine started inside puts its sockets into `folder`, which goes with it; vLLM itself never removes them."""
    before = os.environ.get(SOCKET_FOLDER)
    os.environ[SOCKET_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SOCKET_FOLDER]
        else:
            os.environ[SOCKET_FOLDER] = before


class EngineProcesses:
    """vLLM's engine core and workers, started by this process. What they write goes to this process's output."""

    name = "vLLM's engine"

    def __init__(self, pids: Iterable[int]) -> None:
        found = [processes.look(pid) for pid in sorted(set(pids) - {os.getpid()})]
        self._known = [process for process in found if process is not None]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._known]

    def check(self) -> None:
        gone = [str(known.pid) for known in self._known if not processes.is_alive(known.pid, known.started)]
        if gone:
            raise EngineLost(
                f"{self.name} died: of its processes {', '.join(map(str, self.pids))} these are gone: "
                f"{', '.join(gone)}. Their last words are above in this process's output; {RESUME}."
            )

    def describe(self) -> str:
        found = [processes.look(pid) for pid in self.pids]
        return ", ".join(process.describe() for process in found if process is not None)

    def last_lines(self) -> str:
        return ""

    def kill(self) -> None:
        for known in self._known:
            if processes.is_alive(known.pid, known.started):
                with suppress(ProcessLookupError):
                    os.kill(known.pid, signal.SIGKILL)


def leave_process_group() -> None:
    """End the process groups vLLM made here, so that another engine can start."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
