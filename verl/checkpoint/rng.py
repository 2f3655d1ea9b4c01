"""The random states of this process: Python, numpy, torch on the CPU and on every device, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """A copy of every generator's state; numbers and tensors only."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [tensor.cpu() for tensor in torch.cuda.get_rng_state_all()]
    return state


def check(state: dict[str, Any]) -> None:
    """Raise where `restore` would; no generator of this process changes."""
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])
    for device, tensor in enumerate(state.get("cuda", [])):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.Generator(f"cuda:{device}").set_state(tensor)


def restore(state: dict[str, Any]) -> None:
    """Put every generator back. Devices that are no longer there are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, tensor in enumerate(state.get("cuda", [])):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(tensor, device)
