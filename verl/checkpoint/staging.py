"""Copies in host memory, so that training may go on while they are written.

What always holds: a staged snapshot shares no memory with the engine; the memory is kept and used again, so only
its allocation is slow, and `reserve` can do that ahead of the first save; it is never taken when the host has not
enough of it free.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from verl.checkpoint.direct_io import host_memory
from verl.checkpoint.engine_state import Snapshot
from verl.checkpoint.tensors import Chunk

_ALIGNMENT = 64
_SPARE = 0.1
"""Of the memory that is free, this share is left alone."""
_THREADS = min(4, os.cpu_count() or 1)
_WORTH_A_THREAD = 32 * 1024 * 1024

_Kind = tuple[str, str, tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Section, name, place in the whole, shape, type of a chunk, and whether it comes from a device."""


@dataclass
class _Slab:
    """The buffers of one part: a block of host memory, and one of pinned memory for what comes from a device."""

    kinds: list[_Kind]
    blocks: list[torch.Tensor]
    buffers: list[torch.Tensor]

    @property
    def size(self) -> int:
        return sum(block.numel() for block in self.blocks)


class Staging:
    """Host memory for the chunks of one rank."""

    def __init__(self) -> None:
        self._slabs: dict[str, _Slab] = {}

    def reserve(self, part: str, taken: Snapshot) -> bool:
        """Have memory for snapshots like this one, every page of it. False when too little is free."""
        kinds = [_kind(section, chunk) for section, chunk in taken.tensors()]
        slab = self._slabs.get(part)
        if slab is not None and slab.kinds == kinds:
            return True
        free = free_memory()
        needed = sum(_sizes(kinds))
        if free is not None and needed > free * (1 - _SPARE) + (slab.size if slab else 0):
            return False
        self._slabs.pop(part, None)
        self._slabs[part] = _allocate(kinds)
        return True

    def copy(self, part: str, taken: Snapshot) -> Snapshot:
        """The same snapshot in memory of ours, which `reserve` has made."""
        slab = self._slabs[part]
        staged = Snapshot(plain=dict(taken.plain), chunks={section: [] for section in taken.chunks})
        copies: list[Callable[[], object]] = []
        sizes: list[int] = []
        on_device = False
        for (section, chunk), buffer in zip(taken.tensors(), slab.buffers, strict=True):
            source = chunk.tensor
            staged.chunks[section].append(Chunk(chunk.key, chunk.offsets, buffer))
            if source.device.type != "cpu":
                buffer.copy_(source, non_blocking=True)
                on_device = True
            elif source.is_contiguous():
                copies.append(_memory_copy(buffer, source))
                sizes.append(source.numel() * source.element_size())
            else:
                buffer.copy_(source)
        _run_together(copies, sizes)
        if on_device:
            torch.cuda.synchronize()
        return staged


def free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _kind(section: str, chunk: Chunk) -> _Kind:
    tensor = chunk.tensor
    return section, chunk.key, chunk.offsets, tuple(tensor.shape), tensor.dtype, tensor.device.type != "cpu"


def _sizes(kinds: Sequence[_Kind]) -> list[int]:
    """Bytes of each chunk, up to where the next may begin."""
    raw = (torch.Size(shape).numel() * dtype.itemsize for _, _, _, shape, dtype, _ in kinds)
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in raw]


def _allocate(kinds: list[_Kind]) -> _Slab:
    sizes = _sizes(kinds)
    on_host, pinned = (
        sum(s for s, kind in zip(sizes, kinds, strict=True) if kind[-1] is flag) for flag in (False, True)
    )
    memory = host_memory(on_host)
    memory.fill(0)  # the system gives a page when it is first written to
    blocks = [torch.from_numpy(memory), torch.empty(pinned, dtype=torch.uint8, pin_memory=pinned > 0)]
    ends = [0, 0]
    buffers = []
    for (_, _, _, shape, dtype, from_device), size in zip(kinds, sizes, strict=True):
        begin = ends[from_device]
        ends[from_device] += size
        length = torch.Size(shape).numel() * dtype.itemsize
        buffers.append(blocks[from_device][begin : begin + length].view(dtype).view(shape))
    return _Slab(kinds, blocks, buffers)


def _memory_copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """One plain copy. torch's own would wake all its threads for each of many tensors, which on a busy machine
    costs many times the copy."""
    to, from_, size = target.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
    return lambda: ctypes.memmove(to, from_, size)


def _run_together(copies: Sequence[Callable[[], object]], sizes: Sequence[int]) -> None:
    """On a few threads, each with about as many bytes as the others."""
    threads = max(1, min(_THREADS, sum(sizes) // _WORTH_A_THREAD))
    share, used = sum(sizes) / threads, 0.0
    groups: list[list[Callable[[], object]]] = [[] for _ in range(threads)]
    for copy, size in zip(copies, sizes, strict=True):
        groups[min(threads - 1, int((used + size / 2) / share)) if share else 0].append(copy)
        used += size
    if threads == 1:
        _run_all(groups[0])
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(_run_all, group) for group in groups[1:]]
        _run_all(groups[0])
        for other in others:
            other.result()


def _run_all(copies: Sequence[Callable[[], object]]) -> None:
    for copy in copies:
        copy()
