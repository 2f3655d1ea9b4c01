"""Find and watch processes."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Iterable
from pathlib import Path

import psutil

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def group_members(pgid: int) -> list[psutil.Process]:
    """Live processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == pgid and _running(process):
                found.append(process)
    return found


def ancestors_up_to(pid: int) -> list[psutil.Process]:
    """The processes between this one and its ancestor `pid`, nearest first. Where `pid` is no ancestor (any more): the
    parent, if it runs the same program and so is not merely a process that adopts orphans."""
    try:
        own, line = psutil.Process(), psutil.Process().parents()
        pids = [process.pid for process in line]
        if pid in pids:
            return line[: pids.index(pid)]
        return [parent for parent in line[:1] if parent.pid != 1 and parent.exe() == own.exe()]
    except psutil.Error:
        return []


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names a process. 0 where it is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def is_alive(pid: int, started: int | None = None) -> bool:
    """Whether a process runs; with `started` (see `start_time`), whether it is that very process."""
    with contextlib.suppress(psutil.Error):
        return _running(psutil.Process(pid)) and started in (None, start_time(pid))
    return False


def describe(pid: int) -> str:
    """'process 12 (python) sleeping', for messages."""
    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
        title = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
        return f"process {pid} ({title}) {process.status()}"
    except psutil.Error:
        return f"process {pid} has ended"


def mapped_shared_memory(pids: Iterable[int], pattern: re.Pattern[str]) -> list[str]:
    """Names of the files in /dev/shm that processes have mapped and that match."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, separator, name = line.rpartition(" /dev/shm/")
                if separator and pattern.fullmatch(name):
                    found.add(name)
    return sorted(found)


def wait_gone(pid: int, started: int, timeout_s: float | None = None) -> bool:
    """Wait until a process, not necessarily a child, has ended; False at the timeout."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return start_time(pid) != started or bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
    finally:
        os.close(descriptor)


def _running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in _ENDED
    return False
