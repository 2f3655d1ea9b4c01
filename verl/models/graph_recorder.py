"""Recording CUDA graphs that share one pool of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording CUDA broke off. torch's allocator of pinned memory keeps asking them whether they record."""


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
                torch.cuda.empty_cache()  # the pool of the graphs can only take what is free
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
