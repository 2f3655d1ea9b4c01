"""Files that are on the disk when we say so: size and checksum while writing, fsync, atomic replacement.

What always holds: `crc32` is computed over the bytes as they are handed to the kernel, never by reading the file
back before it is known to be whole; a name that comes from a manifest stays inside the checkpoint's folder.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from verl.errors import CheckpointError

_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True)
class FileRecord:
    """What a manifest knows of a file."""

    size: int
    crc32: str

    def as_json(self) -> dict[str, int | str]:
        return {"size": self.size, "crc32": self.crc32}


class ChecksumFile:
    """A new file; size and checksum grow with each write. It is on the disk only after `sync_all`, but the disk
    begins to write at once, so that there is little left to wait for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._size = 0
        self._crc = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            self._crc = zlib.crc32(piece, self._crc)
            done = 0
            while done < len(piece):  # an unbuffered write may take less than it was given
                done += self._file.write(piece[done:])
            start_writing(self._file.fileno(), self._size, len(piece))
            self._size += len(piece)

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, f"{self._crc:08x}")

    def __enter__(self) -> ChecksumFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's way to ask for writing without waiting for it; elsewhere the disk begins when it likes."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function  # type: ignore[no-any-return]


_sync_file_range = _find_sync_file_range()


def start_writing(descriptor: int, offset: int, length: int) -> None:
    """Ask the disk to begin with these bytes of a file; nobody waits for it."""
    if _sync_file_range is not None and length >= _CHUNK // 8:
        _sync_file_range(
            descriptor, offset, length, 2
        )  # SYNC_FILE_RANGE_WRITE; that it fails does not matter


def write_file(path: Path, text: str) -> FileRecord:
    """A new text file; on the disk only after `sync_all`."""
    with ChecksumFile(path) as file:
        file.write(text.encode("utf-8"))
    return file.record


def replace_file(path: Path, text: str) -> None:
    """`path` holds `text` afterwards, or what it held before, whatever happens in between."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    write_file(temporary, text)
    sync_file(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_all(paths: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """These files, the folders that name them, and these folders are on the disk afterwards. Together: waiting for
    the disk one by one would take many times as long."""
    files = list(paths)
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(sync_file, [*files, *sorted({file.parent for file in files} | set(folders))]):
            pass


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file on the disk."""
    size = crc = 0
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(_CHUNK)
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            size += count
    return FileRecord(size, f"{crc:08x}")


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Names (new files, renames) survive a power cut only when their folder was synced too."""
    sync_file(folder)


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


def inside(folder: Path, name: str) -> Path:
    """`folder / name`; refused when `name` (which a stranger may have written) leads out of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CheckpointError(f"the manifest of {folder} names a file outside its folder: {name!r}")
    full = folder / path
    try:
        if full.is_symlink() or not full.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"the checkpoint file {name!r} in {folder} is a link that leads elsewhere")
    except (ValueError, RuntimeError) as error:  # a NUL or half a surrogate pair in the name; a loop of links
        raise CheckpointError(
            f"the manifest of {folder} names an impossible file, {name!r}: {error}"
        ) from None
    return full


_removals: list[threading.Thread] = []
_removals_lock = threading.Lock()  # a background save removes while the trainer may be waiting for removals


def remove_folder(folder: Path, *, wait: bool = True) -> None:
    """Out of sight first, then gone: a kill in the middle leaves no half-deleted checkpoint under its name. Freeing
    the space may take a while; without `wait` it goes on beside the caller."""
    hidden = folder.with_name(f".{folder.name.lstrip('.')}.deleting")
    finish_removals()
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        os.rename(folder, hidden)
    except FileNotFoundError:
        return
    remover = threading.Thread(target=shutil.rmtree, args=(hidden, True), name="removing a checkpoint")
    remover.start()
    with _removals_lock:
        _removals.append(remover)
    if wait:
        finish_removals()


def finish_removals() -> None:
    """Until the space of everything removed so far is free."""
    with _removals_lock:
        waiting = list(_removals)
    for remover in waiting:
        remover.join()
    with _removals_lock:
        _removals[:] = [remover for remover in _removals if remover.is_alive()]
