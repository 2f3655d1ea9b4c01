"""Moving things between device and host memory: whole parameters and optimiser state between phases, activations
between forward and backward.

What always holds: a parameter stays the same object, only its storage moves, so whoever shares it still does.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from verl.rollout.native.vmm_buffer import Parkable, reserve_tensors

log = logging.getLogger(__name__)


def same_device(first: torch.device, second: torch.device) -> bool:
    """`cuda` is the current GPU, whichever it is: torch does not hold it equal to `cuda:0`."""
    return first.type == second.type and (None in (first.index, second.index) or first.index == second.index)


def _copy_to_host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x.to("cpu", copy=True)
    held = torch.empty_like(x, device="cpu", pin_memory=True)
    return held.copy_(x, non_blocking=True)


class ModelMemory:
    """A model's parameters and buffers, on its device or in host memory.

    What is not sharded comes back to the addresses it had, so that captured CUDA graphs stay valid."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: bool) -> None:
        self.model, self.device, self.sharded = model, device, sharded
        self._memory: Parkable | None = None
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id: the parameter or buffer and its place on the device."""

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    @torch.no_grad()
    def leave(self) -> None:
        """To host memory."""
        if self.sharded:
            self.model.to("cpu")  # FSDP2 replaces its shards itself
        else:
            for tensor in self._tensors():
                tensor.data = _copy_to_host(tensor.data)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if self._memory is not None:
            self._memory.park()

    @torch.no_grad()
    def enter(self) -> None:
        """Back to the device."""
        if self.sharded:
            self.model.to(self.device)
        else:
            self._take_memory()
            for tensor in self._tensors():
                known, place = self._places.get(id(tensor), (None, tensor))
                if known is tensor and place.shape == tensor.shape and place.dtype == tensor.dtype:
                    tensor.data = place.copy_(tensor.data, non_blocking=True)
                else:  # a buffer made since
                    tensor.data = tensor.data.to(self.device)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _take_memory(self) -> None:
        if self._memory is None:
            tensors = self._tensors()
            self._memory, places = reserve_tensors([(x.shape, x.dtype) for x in tensors], self.device)
            self._places = {id(x): (x, place) for x, place in zip(tensors, places, strict=True)}
            return
        try:
            self._memory.unpark()
        except RuntimeError as error:
            log.warning("%s: its weights move to other addresses, CUDA graphs are captured again", error)
            self._memory, self._places = None, {}


class ActivationOffload:
    """Keep what autograd saves in host memory until the backward pass asks for it.

    Parameters and small tensors stay where they are: moving those would cost more than it saves."""

    def __init__(self, device: torch.device, smallest_bytes: int = 1 << 20) -> None:
        self.device = device
        self.smallest_bytes = smallest_bytes
        self.moved_bytes = 0

    def _pack(self, x: torch.Tensor) -> Any:
        held_by_model = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if held_by_model or not same_device(x.device, self.device) or x.nbytes < self.smallest_bytes:
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
