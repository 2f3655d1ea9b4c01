"""Offloading to host memory: parameters between phases, activations between forward and backward.

A parameter stays the same object, only its storage moves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from verl.models.vmm_buffer import SleepableMemory

log = logging.getLogger(__name__)


def same_device(first: torch.device, second: torch.device) -> bool:
    """`cuda` is the current GPU, whichever it is: torch does not hold it equal to `cuda:0`."""
    return first.type == second.type and (None in (first.index, second.index) or first.index == second.index)


def _copy_to_host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x.to("cpu", copy=True)
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


class ModelMemory:
    """A model's parameters and buffers, on its device or in host memory.

    Where nothing is sharded they come back to the addresses they had, so that captured CUDA graphs stay valid."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: bool) -> None:
        self.model, self.device, self.sharded = model, device, sharded
        self._memory: SleepableMemory | None = None
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id: the parameter or buffer and its view of `_memory`."""

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    @torch.no_grad()
    def offload(self) -> None:
        if self.sharded:
            self.model.to("cpu")  # FSDP2 replaces its shards itself
        else:
            for tensor in self._tensors():
                tensor.data = _copy_to_host(tensor.data)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if self._memory is not None:
            self._memory.sleep()

    @torch.no_grad()
    def onload(self) -> None:
        if self.sharded:
            self.model.to(self.device)
        else:
            self._map_memory()
            for tensor in self._tensors():
                known, view = self._views.get(id(tensor), (None, tensor))
                if known is tensor and view.shape == tensor.shape and view.dtype == tensor.dtype:
                    tensor.data = view.copy_(tensor.data, non_blocking=True)
                else:  # a buffer that is new
                    tensor.data = tensor.data.to(self.device)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _map_memory(self) -> None:
        if self._memory is None:
            from verl.models.vmm_buffer import reserve_tensors

            tensors = self._tensors()
            self._memory, views = reserve_tensors([(x.shape, x.dtype) for x in tensors], self.device)
            self._views = {id(x): (x, view) for x, view in zip(tensors, views, strict=True)}
            return
        try:
            self._memory.wake_up()
        except RuntimeError as error:
            log.warning("%s: its weights move to other addresses, CUDA graphs are captured again", error)
            self._memory, self._views = None, {}


class ActivationOffload:
    """Keeps what autograd saves in host memory until the backward pass needs it, except parameters and small tensors,
    whose transfer would cost more than it saves."""

    def __init__(self, device: torch.device, smallest_bytes: int = 1 << 20) -> None:
        self.device = device
        self.smallest_bytes = smallest_bytes
        self.moved_bytes = 0

    def _pack(self, x: torch.Tensor) -> Any:
        is_parameter = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if is_parameter or not same_device(x.device, self.device) or x.nbytes < self.smallest_bytes:
            return x
        self.moved_bytes += x.nbytes
        return (x.device, _copy_to_host(x.detach()))

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        device, x = saved
        return x.to(device, non_blocking=True)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
