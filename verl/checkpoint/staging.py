"""Copies of a snapshot in host memory (pinned for tensors on a device), so that training continues while it is written.

The buffers are allocated once, ahead of the first save, and reused; nothing is allocated when too little is free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from verl.checkpoint.engine_state import Snapshot
from verl.checkpoint.tensors import Chunk
from verl.memory import free_host_bytes

_THREADS = min(4, os.cpu_count() or 1)
_SPARE = 0.1
"""Of free memory, this share is not used."""


class Staging:
    """Host buffers for the chunks of each part of one rank."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[torch.Tensor]] = {}

    def reserve(self, part: str, snapshot: Snapshot) -> bool:
        """Have buffers for snapshots of these shapes. False when too little memory is free."""
        tensors = [chunk.tensor for _, chunk in snapshot.tensors()]
        buffers = self._buffers.get(part, [])
        if len(buffers) == len(tensors) and all(map(_fits, buffers, tensors)):
            return True
        held = sum(buffer.nbytes for buffer in buffers)
        if snapshot.size > free_host_bytes() * (1 - _SPARE) + held:
            return False
        self._buffers.pop(part, None)
        del buffers
        self._buffers[part] = [_allocate(tensor) for tensor in tensors]
        return True

    def copy(self, part: str, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in the buffers that `reserve` made."""
        staged = Snapshot(plain=dict(snapshot.plain), chunks={section: [] for section in snapshot.chunks})
        pairs = []
        for (section, chunk), buffer in zip(snapshot.tensors(), self._buffers[part], strict=True):
            staged.chunks[section].append(Chunk(chunk.key, chunk.offsets, buffer))
            pairs.append((buffer, chunk.tensor))
        pairs.sort(key=lambda pair: pair[1].nbytes)  # so that every n-th pair is an equal share
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_copy_all, [pairs[share::_THREADS] for share in range(_THREADS)]))
        if any(source.is_cuda for _, source in pairs):
            torch.cuda.synchronize()
        return staged


def _fits(buffer: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and buffer.is_pinned() == tensor.is_cuda
    )


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    """Zeroed, because the system assigns memory only when it is written to."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, source in pairs:
        if source.device.type == "cpu" and source.is_contiguous():
            # `copy_` would wake all of torch's threads for each of many tensors.
            ctypes.memmove(buffer.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            buffer.copy_(source, non_blocking=True)
