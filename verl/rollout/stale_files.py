"""Scratch folders named after their process, so that those of killed processes can be found and removed.

A folder is called `verl-<kind>-<host>-<pid>-<start>-<random>`. Only this user's folders are removed whose owner ran on
this boot of this machine, in this container's pid namespace, and has ended.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from verl.processes import is_alive, mapped_shared_memory, start_time

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
SEGMENT = re.compile(r"psm_[0-9a-f]+|vllm_dist_[^/ ]+")
"""Files that Python or vLLM create in shared memory, and vLLM among temporary files for its process group."""
_NAME = re.compile(r"verl-(?:rollout|weights)-(\w+)-([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]+")
_SHORT = Path("/tmp")
_MAX_SOCKET_PATH = 107  # Linux
_SOCKET_NAME = 1 + 36  # vLLM's are the longest
_LISTED = "files"


def new_path(kind: str, parent: Path | None = None) -> Path:
    """A path for a folder of this process, by default where temporary files are; it is not created."""
    pid = os.getpid()
    name = f"verl-{kind}-{_host_id()}-{pid:x}-{start_time(pid):x}-{secrets.token_hex(4)}"
    path = (parent or Path(tempfile.gettempdir())) / name
    fits = len(os.fsencode(path)) + _SOCKET_NAME <= _MAX_SOCKET_PATH
    return path if fits or parent or not _SHORT.is_dir() else _SHORT / name


def sweep(parents: Iterable[Path] | None = None) -> list[Path]:
    """Remove the folders of processes that have ended; which they were."""
    removed = []
    for parent in parents if parents is not None else {Path(tempfile.gettempdir()), _SHORT, MEMORY}:
        for folder in parent.glob("verl-*"):
            name = _NAME.fullmatch(folder.name)
            if not name or name[1] != _host_id() or not _is_ours(folder):
                continue
            if _host_id() != "unknown" and not is_alive(int(name[2], 16), int(name[3], 16)):
                remove(folder)
                removed.append(folder)
    if removed:
        log.info("removed scratch folders of killed processes: %s", ", ".join(map(str, removed)))
    return removed


def remember_files(folder: Path, pids: Iterable[int], files: Iterable[str] = ()) -> None:
    """List the shared memory these processes use, which killed ones do not remove, and other `files` of theirs."""
    paths = [str(MEMORY / name) for name in mapped_shared_memory(pids, SEGMENT)]
    (folder / _LISTED).write_text("\n".join([*paths, *sorted(set(files))]))


def remove(folder: Path) -> None:
    """The folder and the files it lists."""
    listed = folder / _LISTED
    if listed.is_file():
        for path in map(Path, listed.read_text().splitlines()):
            if SEGMENT.fullmatch(path.name):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _host_id() -> str:
    """This boot of this machine and this pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "unknown"
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False
