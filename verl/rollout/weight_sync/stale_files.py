"""Scratch folders that carry their owner's name, so that those of a killed process can be told from those in use.

A folder is called `verl-<kind>-<place>-<process>-<start>-<random>`: whoever makes one later on the same machine removes
those whose process is gone, with the shared memory they list.

What always holds: nothing is removed but this user's folders whose owner ran on this boot of this machine and in the
process numbers of this container, and is dead.
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

from verl.rollout.weight_sync import processes

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
_KINDS = ("rollout", "weights", "adapter")
_NAME = re.compile(rf"verl-(?:{'|'.join(_KINDS)})-(\w+)-([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]+")
_SHORT = Path("/tmp")
_LONGEST_SOCKET = 107  # Linux
_SOCKET_NAME = 1 + 36  # vLLM's own are the longest
_SEGMENTS = "shared_memory"


def new_path(kind: str, parent: Path | None = None) -> Path:
    """A path for a folder of this process, by default where temporary files are; nothing is made yet."""
    me = processes.look(os.getpid())
    owner = f"{_place()}-{os.getpid():x}-{me.started if me else 0:x}"
    name = f"verl-{kind}-{owner}-{secrets.token_hex(4)}"
    path = (parent or Path(tempfile.gettempdir())) / name
    # Where temporary files have a long way, a socket in the folder could not be opened.
    fits = len(os.fsencode(path)) + _SOCKET_NAME <= _LONGEST_SOCKET
    return path if fits or parent or not _SHORT.is_dir() else _SHORT / name


def sweep(parents: Iterable[Path] | None = None) -> list[Path]:
    """Remove what dead processes left, and say what it was."""
    removed = []
    for parent in parents if parents is not None else {Path(tempfile.gettempdir()), _SHORT, MEMORY}:
        for folder in parent.glob("verl-*"):
            named = _NAME.fullmatch(folder.name)
            if named and named[1] == _place() and _is_ours(folder) and not _lives(named[2], named[3]):
                remove(folder)
                removed.append(folder)
    if removed:
        log.info("removed what killed processes left: %s", ", ".join(map(str, removed)))
    return removed


def remember_segments(folder: Path, pids: Iterable[int]) -> None:
    """Write down the shared memory these processes use: who is killed does not remove it."""
    found = processes.segments(pids)
    if found:
        (folder / _SEGMENTS).write_text("\n".join(found))


def remove(folder: Path) -> None:
    """The folder and the shared memory it lists, whose users have ended."""
    listed = folder / _SEGMENTS
    if listed.is_file():
        for name in listed.read_text().splitlines():
            if processes.SEGMENT.fullmatch(name):
                (MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _place() -> str:
    """This boot of this machine and the numbering of processes in this container; empty where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbering = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "unknown"
    return hashlib.sha256(f"{boot} {numbering}".encode()).hexdigest()[:8]


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def _lives(pid: str, started: str) -> bool:
    return _place() == "unknown" or processes.is_alive(int(pid, 16), int(started, 16))
