"""Files with size and checksum known from the bytes written, fsync, atomic replacement, locks, removal."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from verl.errors import CheckpointError

BUFFER = 8 * 1024 * 1024
_ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class FileRecord:
    """What a manifest knows of a file."""

    size: int
    crc32: str


class ChecksumFile:
    """A new file; `record` is of the bytes given to the kernel. It is on the disk only after `sync_all`.

    Two buffers: a thread writes one to the disk while the caller computes the checksum of the next. With `direct` the
    writes bypass the page cache (O_DIRECT), which saves the kernel's copy: 40 % of the processor time of a save, and
    what it would evict from the cache. File systems without O_DIRECT get ordinary writes."""

    def __init__(self, path: Path, *, direct: bool = False, buffer: int = BUFFER) -> None:
        self._descriptor, self._direct = _create(path, direct)
        self._buffer, self._other = (np.frombuffer(mmap.mmap(-1, buffer), np.uint8) for _ in range(2))
        self._used = 0
        self._size = 0
        self._crc = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint writer")
        self._pending: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            taken = view[: len(self._buffer) - self._used]
            self._buffer[self._used : self._used + len(taken)] = np.frombuffer(taken, np.uint8)
            self._used += len(taken)
            view = view[len(taken) :]
            if self._used == len(self._buffer):
                self._flush()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, f"{self._crc:08x}")

    def __enter__(self) -> ChecksumFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._flush()  # waits for the write of the first
                os.ftruncate(self._descriptor, self._size)  # a direct write ends at a block
        finally:
            self._writer.shutdown(wait=True)
            os.close(self._descriptor)

    def _flush(self) -> None:
        """Start writing the buffer, then wait for the write before, whose buffer is the next to be filled."""
        content, offset, length = memoryview(self._buffer), self._size, self._used  # type: ignore[arg-type]
        end = -(-length // _ALIGNMENT) * _ALIGNMENT if self._direct else length
        self._buffer[length:end] = 0
        started = self._writer.submit(self._write_at, content[:end], offset)
        self._crc = zlib.crc32(content[:length], self._crc)
        self._size += length
        self._used = 0
        if self._pending is not None:
            self._pending.result()
        self._pending = started
        self._buffer, self._other = self._other, self._buffer

    def _write_at(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._descriptor, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # Another alignment is required, or a write stopped inside a block: continue without O_DIRECT.
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
                self._direct = False


def _create(path: Path, direct: bool) -> tuple[int, bool]:
    """A new file, and whether writes to it are direct."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    if direct and _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some systems create the file before they refuse
    return os.open(path, flags, 0o666), False


def write_file(path: Path, text: str) -> FileRecord:
    """A new text file; on the disk only after `sync_all`."""
    content = text.encode("utf-8")
    with open(path, "xb") as file:
        file.write(content)
    return FileRecord(len(content), f"{zlib.crc32(content):08x}")


def replace_file(path: Path, text: str) -> None:
    """Replace the content atomically: after a crash `path` has the old text or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    write_file(temporary, text)
    sync_file(temporary)
    os.replace(temporary, path)
    sync_file(path.parent)


def sync_all(paths: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """fsync these files, the folders that name them, and these folders, in parallel."""
    files = list(paths)
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(sync_file, [*files, *sorted({file.parent for file in files} | set(folders))]):
            pass


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file on the disk."""
    size = crc = 0
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(BUFFER)
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            size += count
    return FileRecord(size, f"{crc:08x}")


def sync_file(path: Path) -> None:
    """Names (new files, renames) survive a power cut only when their folder was synced too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> Iterable[Path]:
    """Every plain file below `folder`, in a stable order; links are not followed."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root) / name
            if not path.is_symlink():
                yield path


def folders_below(folder: Path) -> Iterable[Path]:
    """`folder` and every folder in it: a folder without files is named by its parent all the same."""
    return (Path(root) for root, _, _ in os.walk(folder))


_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust name an error of the system, in a bare Exception."""


def os_error_number(error: Exception) -> int | None:
    """errno, where the system is the cause."""
    found = _OS_ERROR.search(str(error))
    return getattr(error, "errno", None) or (int(found.group(1)) if found else None)


def disk_is_full(error: Exception) -> bool:
    return os_error_number(error) in (errno.ENOSPC, errno.EDQUOT)


def inside(folder: Path, name: str) -> Path:
    """`folder / name`; an error when the untrusted `name` leads out of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CheckpointError(f"the manifest of {folder} names a file outside its folder: {name!r}")
    full = folder / path
    try:
        if full.is_symlink() or not full.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"the checkpoint file {name!r} in {folder} is a link that leads elsewhere")
    except (ValueError, RuntimeError) as error:  # a NUL or half a surrogate pair in the name; a loop of links
        raise CheckpointError(f"the manifest of {folder} names {name!r}: {error}") from None
    return full


_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF)
"""From file systems without locks (Lustre mounted without them), and from NFS for an exclusive lock where the file
could only be opened to read."""


def lock(descriptor: int, operation: int) -> bool:
    """`fcntl.flock`; False where another process has the lock. Without locks it is as if there were no other."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def in_background(action: Callable[[], Any], name: str) -> Future[Any]:
    """Run it in a thread that ends with it. Not a daemon: Python may not stop one in the middle of torch at exit."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return future


_removals: list[Future[None]] = []


def remove_folder(folder: Path, *, wait: bool = True) -> None:
    """Rename to a hidden name, then delete: a kill in the middle leaves no half-deleted checkpoint under its name.
    Without `wait` a thread deletes."""
    hidden = folder.with_name(f".{folder.name.lstrip('.')}.deleting")
    finish_removals()
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        os.rename(folder, hidden)
    except FileNotFoundError:
        return
    _removals.append(in_background(lambda: shutil.rmtree(hidden, ignore_errors=True), "checkpoint removal"))
    if wait:
        finish_removals()


def finish_removals() -> None:
    """Wait for the threads of `remove_folder`."""
    futures.wait(_removals)
