"""What vLLM changes about the process it runs in, kept or put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


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


def leave_process_group() -> None:
    """End the process groups vLLM made here, so that another engine can start."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
