"""Processes as Linux shows them: when they began, who belongs to a group, what each does right now.

What always holds: nothing here waits or signals; elsewhere than on Linux nobody is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATES = {
    "R": "runs",
    "S": "waits",
    "D": "waits for a device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
}
_GONE = ("Z", "X")
SEGMENT = re.compile(r"psm_[0-9a-f]+|vllm_dist_[^/ ]+")


@dataclass(frozen=True)
class Process:
    """One look at a process."""

    pid: int
    state: str
    parent: int
    group: int
    started: int
    """In the system's ticks since it began: with the number it names a process for ever."""

    @property
    def gone(self) -> bool:
        return self.state in _GONE

    def describe(self) -> str:
        return f"process {self.pid} ({_title(self.pid)}) {_STATES.get(self.state, 'is gone')}"


def look(pid: int) -> Process | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def between(host: int) -> list[Process]:
    """Who stands between this process and `host`, which started the first of them. Where `host` is gone from the line:
    the parent, unless that is somebody who only takes in orphans."""
    line: list[Process] = []
    process = look(os.getppid())
    while process is not None and process.pid != host:
        line.append(process)
        process = look(process.parent)
    if process is not None:
        return line
    return [
        parent for parent in line[:1] if parent.pid != 1 and _program(parent.pid) == _program(os.getpid())
    ]


def members(group: int) -> list[Process]:
    """Living processes of a group."""
    numbers = [int(name) for name in os.listdir(_PROC) if name.isdigit()] if _PROC.is_dir() else []
    found = [process for pid in numbers if (process := look(pid)) is not None]
    return [process for process in found if process.group == group and not process.gone]


def is_alive(pid: int, started: int) -> bool:
    """Whether the process of this number that began then still runs."""
    process = look(pid)
    return process is not None and process.started == started and not process.gone


def segments(pids: Iterable[int]) -> list[str]:
    """Names of the shared memory that these processes use, of Python's making or of vLLM's."""
    found: set[str] = set()
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "maps").read_text().splitlines()
        except OSError:
            continue
        names = [name for line in lines if (name := line.rpartition(" /dev/shm/")[2]) != line]
        found |= {name for name in names if SEGMENT.fullmatch(name)}
    return sorted(found)


def _program(pid: int) -> str:
    try:
        return os.readlink(_PROC / str(pid) / "exe")
    except OSError:
        return ""


def _title(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "?"
    return words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
