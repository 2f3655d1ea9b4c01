"""What vLLM changes about the process it runs in, kept or put back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

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


def leave_process_group() -> None:
    """End the process groups vLLM made here, so that another engine can start."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
