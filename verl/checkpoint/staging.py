"""Copies in host memory, so that training may go on while they are written.

What always holds: a staged snapshot shares no memory with the engine; the buffers are kept and used again, so
only the first asynchronous save pays for their allocation.
"""

from __future__ import annotations

import torch

from verl.checkpoint.parts import Snapshot
from verl.checkpoint.tensors import Chunk, copy_into


class Staging:
    """Host buffers for the chunks of one rank."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, str, tuple[int, ...]], torch.Tensor] = {}

    def copy(self, part: str, taken: Snapshot) -> Snapshot:
        """The same snapshot in buffers of ours."""
        staged = Snapshot(plain=dict(taken.plain))
        on_device = False
        for section, chunk in taken.tensors():
            buffer = self._buffer(part, section, chunk)
            if chunk.tensor.is_cuda:
                buffer.copy_(chunk.tensor, non_blocking=True)
                on_device = True
            else:
                copy_into(buffer, chunk.tensor)
            staged.chunks.setdefault(section, []).append(Chunk(chunk.key, chunk.offsets, buffer))
        for section in taken.chunks:
            staged.chunks.setdefault(section, [])
        if on_device:
            torch.cuda.synchronize()
        return staged

    def _buffer(self, part: str, section: str, chunk: Chunk) -> torch.Tensor:
        key = (part, section, chunk.key, chunk.offsets)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != chunk.tensor.shape or buffer.dtype != chunk.tensor.dtype:
            buffer = torch.empty(
                chunk.tensor.shape, dtype=chunk.tensor.dtype, pin_memory=chunk.tensor.is_cuda
            )
            self._buffers[key] = buffer
        return buffer
