"""Moving things between device and host memory: whole parameters and optimiser state between phases, activations
between forward and backward.

What always holds: a parameter stays the same object, only its storage moves, so whoever shares it still does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _copy_to_host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x.to("cpu", copy=True)
    held = torch.empty_like(x, device="cpu", pin_memory=True)
    return held.copy_(x, non_blocking=True)


def move_model(model: nn.Module, device: torch.device, sharded: bool) -> None:
    """Parameters and buffers to `device`, in place."""
    if sharded:
        model.to(device)  # FSDP2 replaces its shards itself
    else:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != device.type:
                tensor.data = _copy_to_host(tensor.data) if device.type == "cpu" else tensor.data.to(device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if device.type == "cpu":
            torch.cuda.empty_cache()


class ActivationOffload:
    """Keep what autograd saves in host memory until the backward pass asks for it.

    Parameters and small tensors stay where they are: moving those would cost more than it saves."""

    def __init__(self, device: torch.device, smallest_bytes: int = 1 << 20) -> None:
        self.device = device
        self.smallest_bytes = smallest_bytes
        self.moved_bytes = 0

    def _pack(self, x: torch.Tensor) -> Any:
        held_by_model = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if held_by_model or x.device != self.device or x.nbytes < self.smallest_bytes:
            return x
        self.moved_bytes += x.nbytes
        return (x.device, _copy_to_host(x.detach()))

    @staticmethod
    def _unpack(held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        device, x = held
        return x.to(device, non_blocking=True)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
