"""Device memory that can be released while the trainer needs it and allocated again at the same address.

Captured graphs hold addresses; capturing them again after every training phase would cost more than generating. So the
address range stays reserved and only the memory behind it comes and goes (CUDA's virtual memory management, called
through the driver's library). While asleep, nothing may touch the range; memory is mapped or released only when the
device is idle. `GraphRecorder` captures graphs that share one pool of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

log = logging.getLogger(__name__)

ALIGNMENT = 512
"""Of a tensor in a block, in bytes: what torch's allocator gives."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    """Call a function of libcuda; one that fails raises RuntimeError. Integers are 64 bits wide."""
    wide = [ctypes.c_uint64(x) if isinstance(x, int) else x for x in arguments]
    code = getattr(_library(), name)(*wide)
    if code != 0:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


class VMMBuffer:
    """A range of device memory, built by `reserve`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        properties = ctypes.byref(self._properties)
        _driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), properties, 0)
        self.size = -(-size // granularity.value) * granularity.value
        self._address = ctypes.c_uint64()
        self._handle = ctypes.c_uint64()
        self.mapped = False
        _driver("cuMemAddressReserve", ctypes.byref(self._address), self.size, 0, 0, 0)
        self.wake_up()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def wake_up(self) -> None:
        """Allocate memory behind the range; its content is undefined. RuntimeError when there is too little."""
        if self.mapped:
            return
        torch.cuda.synchronize(self._device)
        request = (ctypes.byref(self._handle), self.size, ctypes.byref(self._properties), 0)
        try:
            _driver("cuMemCreate", *request)
        except RuntimeError:
            torch.cuda.empty_cache()  # what torch keeps for later is not free to the driver
            _driver("cuMemCreate", *request)
        _driver("cuMemMap", self._address, self.size, 0, self._handle, 0)
        self.mapped = True
        access = _Access(self._location, _READ_WRITE)
        _driver("cuMemSetAccess", self._address, self.size, ctypes.byref(access), 1)

    def sleep(self) -> None:
        """Release the memory."""
        if not self.mapped:
            return
        torch.cuda.synchronize(self._device)
        self.mapped = False
        _driver("cuMemUnmap", self._address, self.size)
        _driver("cuMemRelease", self._handle)

    def __del__(self) -> None:
        try:
            self.sleep()
            _driver("cuMemAddressFree", self._address, self.size)
        except (RuntimeError, AttributeError, TypeError):  # the process ends, or __init__ failed
            pass


def reserve(size: int, device: torch.device) -> tuple[VMMBuffer, torch.Tensor] | None:
    """A buffer and its bytes as a tensor; None without CUDA or where the driver cannot do it."""
    if device.type != "cuda":
        return None
    try:
        memory = VMMBuffer(size, device)
        return memory, torch.as_tensor(memory, device=device)[:size]
    except torch.cuda.OutOfMemoryError:
        raise
    except (OSError, AttributeError, RuntimeError) as error:
        log.info(
            "no CUDA virtual memory management (%s): released memory gets another address, and CUDA graphs are "
            "captured again",
            error,
        )
        return None


class _HostMemory:
    """Pages of the host: released to the system while asleep, the address range stays."""

    def __init__(self, size: int) -> None:
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def sleep(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)

    def wake_up(self) -> None:
        pass  # the system maps pages when they are written


class _AllocatorMemory:
    """Memory of torch's allocator: it may come back at another address, and views of it follow."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def sleep(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def wake_up(self) -> None:
        self.bytes.untyped_storage().resize_(self._size)


SleepableMemory = VMMBuffer | _HostMemory | _AllocatorMemory
"""Memory that can be released and allocated again; its content is lost."""


def reserve_tensors(
    shapes: Iterable[tuple[torch.Size, torch.dtype]], device: torch.device
) -> tuple[SleepableMemory, list[torch.Tensor]]:
    """Tensors of these shapes in one block of memory that can be released, on any device. Their addresses stay,
    except on a GPU without virtual memory management."""
    offsets, size = [], 0
    for shape, dtype in shapes:
        offsets.append((size, shape, dtype))
        size += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    reserved = reserve(max(size, 1), device)
    if reserved is not None:
        memory: SleepableMemory = reserved[0]
        raw = reserved[1]
    else:
        ordinary = _HostMemory(size) if device.type == "cpu" else _AllocatorMemory(size, device)
        memory, raw = ordinary, ordinary.bytes
    return memory, [
        raw[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for start, shape, dtype in offsets
    ]


_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording CUDA broke off. torch's allocator of pinned memory keeps asking them whether they record."""


_PLENTY = 8
"""This part of a device's memory, if free, is enough for a capture."""


class GraphRecorder:
    """One pool and one stream: graphs share memory only when they are recorded on the same stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, work: Callable[[], None], warm_up: Callable[[], None] | None = None
    ) -> torch.cuda.CUDAGraph:
        """`work` as a graph. It (or `warm_up`) runs once before, which compiles and loads everything. Errors of `work`
        come out, and this recorder must not be used after one."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            # torch.cuda.graph would do all this, but stays on its stream when ending the capture fails.
            with torch.cuda.stream(self._stream):
                # Triton compiles and cuBLAS allocates its workspace in this run: neither is allowed while capturing.
                (warm_up or work)()
                torch.cuda.synchronize(self._device)
                # The pool of the graphs can only take what is free. Where plenty is, what torch holds stays with it:
                # to free and allocate the memory of a training step again takes longer than the capture.
                free, total = torch.cuda.mem_get_info(self._device)
                if free < total // _PLENTY:
                    torch.cuda.empty_cache()
                # Threads of others (loading data, watching) may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                    graph.capture_end()
                except BaseException:
                    self._break_off(graph)
                    raise
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose work failed. Where CUDA has broken it off already, torch does not reach the lines that
        take its allocator out of the pool: they follow here."""
        try:
            graph.capture_end()
        except RuntimeError:
            _BROKEN.append(graph)
            index = self._stream.device_index
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
