"""Large new files, written by a few threads past the page cache.

A file is cut into pieces. A thread copies a piece into an aligned buffer, computes its checksum there and hands it
to the disk directly (O_DIRECT): the kernel makes no copy of its own, so a save costs little processor time and
leaves the page cache to others. The checksums of the pieces are joined into that of the file by arithmetic.

What always holds: the record is of the bytes that were handed to the kernel; memory holds one buffer for each
thread; what is written waits for the threads, so that lazily made data does not pile up; a file system that
refuses O_DIRECT gets the same bytes in the ordinary way; nothing counts as on the disk before `sync_all`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np

from verl.checkpoint.files import FileRecord, start_writing

PIECE = 8 * 1024 * 1024
LARGE = 1024 * 1024
"""From this size on a file is worth threads."""
_ALIGNMENT = 4096
_POLYNOMIAL = 0xEDB88320
_DIRECT = getattr(os, "O_DIRECT", 0)


class Writers:
    """The threads and buffers with which one save writes its large files; use as a context."""

    def __init__(self, count: int | None = None, *, piece: int = PIECE, direct: bool = True) -> None:
        # Two keep a disk busy while one of them copies; more help only where there are processors to spare.
        count = count or min(4, max(2, (os.cpu_count() or 1) // 4))
        self.piece = piece
        self.direct = direct
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="checkpoint writer")
        self._places = threading.BoundedSemaphore(2 * count)
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(count):
            self._buffers.put(host_memory(piece))

    def __enter__(self) -> Writers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, task: Callable[[np.ndarray], int]) -> Future[int]:
        """Run it with a buffer, soon; waits while too many others are waiting."""
        self._places.acquire()
        try:
            return self._pool.submit(self._run, task)
        except BaseException:
            self._places.release()
            raise

    def _run(self, task: Callable[[np.ndarray], int]) -> int:
        buffer = self._buffers.get()
        try:
            return task(buffer)
        finally:
            self._buffers.put(buffer)
            self._places.release()


def host_memory(size: int) -> np.ndarray:
    """Bytes that begin at a page, in large pages where the system has them: those are quicker to get and to fill."""
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class BulkFile:
    """A new file that `Writers` write; size and checksum are known once it is closed."""

    def __init__(self, path: Path, writers: Writers) -> None:
        self._writers = writers
        self._descriptor, self._direct = _create(path, writers.direct)
        self._waiting: list[memoryview] = []
        self._held = 0
        self._sent: list[tuple[int, Future[int]]] = []
        self._size = 0
        self._record: FileRecord | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """The bytes must not change until the file is closed."""
        view = memoryview(data).cast("B")
        while len(view):
            taken = view[: self._writers.piece - self._held]
            self._waiting.append(taken)
            self._held += len(taken)
            view = view[len(taken) :]
            if self._held == self._writers.piece:
                self._send()

    @property
    def record(self) -> FileRecord:
        if self._record is None:
            raise RuntimeError("the file is still being written")
        return self._record

    def __enter__(self) -> BulkFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._send()
            done = [(length, _outcome(future)) for length, future in self._sent]
            if kind is not None:
                return
            crc = 0
            for length, result in done:
                if isinstance(result, BaseException):
                    raise result
                crc = joined_crc32(crc, result, length)
            os.ftruncate(self._descriptor, self._size)  # a direct write ends at a block
            self._record = FileRecord(self._size, f"{crc:08x}")
        finally:
            os.close(self._descriptor)

    def _send(self) -> None:
        if not self._held:
            return
        views, offset, length = self._waiting, self._size, self._held
        future = self._writers.submit(lambda buffer: self._put(buffer, views, offset, length))
        self._sent.append((length, future))
        self._size += length
        self._waiting, self._held = [], 0
        failed = next((f.exception() for _, f in self._sent if f.done() and f.exception()), None)
        if failed is not None:  # no use in going on
            raise failed

    def _put(self, buffer: np.ndarray, views: Sequence[memoryview], offset: int, length: int) -> int:
        at = 0
        for view in views:
            buffer[at : at + len(view)] = np.frombuffer(view, np.uint8)
            at += len(view)
        content = memoryview(buffer)  # type: ignore[arg-type]
        crc = zlib.crc32(content[:length])
        end = -(-length // _ALIGNMENT) * _ALIGNMENT if self._direct else length
        buffer[length:end] = 0
        self._write_at(content[:end], offset)
        if not self._direct:
            start_writing(self._descriptor, offset, length)
        return crc

    def _write_at(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._descriptor, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # Another alignment is wanted, or a write stopped inside a block: go on in the ordinary way.
                _make_ordinary(self._descriptor)
                self._direct = False


def _create(path: Path, direct: bool) -> tuple[int, bool]:
    """A new file, and whether writes to it are direct."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some systems make the file before they refuse
    return os.open(path, flags, 0o666), False


def _make_ordinary(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _outcome(future: Future[int]) -> int | BaseException:
    return future.exception() or future.result()


def joined_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes in a row, from theirs and the length of the second."""
    return _times(_shift(length), first) ^ second


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """x to the power of the number of bits, modulo the polynomial of CRC-32 (bits reversed, as CRC-32 has them)."""
    result, square, bits = 1 << 31, 1 << 30, 8 * length
    while bits:
        if bits & 1:
            result = _times(square, result)
        square = _times(square, square)
        bits >>= 1
    return result


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
