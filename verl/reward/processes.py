"""See and end every process a worker has started, however it tried to get away.

A worker leads its own session, adopts its orphans (Linux child subreaper) and carries a secret word in its
environment that children inherit. So its descendants can be counted while it lives, and what outlives it can
be found by the word. On systems without /proc only the process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "VERL_REWARD_WORKER"
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Tree:
    """A process and its descendants."""

    pids: tuple[int, ...]
    resident_bytes: int
    zombies: int


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Children of dead children become ours instead of init's. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_first_when_memory_is_short() -> None:
    """When the machine runs out of memory, the kernel should take this process and not the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def trees(roots: list[int]) -> dict[int, Tree]:
    """Every root's descendants, from one walk over /proc."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    zombies: dict[int, int] = {}
    for pid, parent, pages in _walk():
        if pages is None:
            zombies[parent] = zombies.get(parent, 0) + 1
            continue
        children.setdefault(parent, []).append(pid)
        resident[pid] = pages * _PAGE
    found = {}
    for root in roots:
        pids, stack = [], [root]
        while stack:
            pid = stack.pop()
            if pid in resident:
                pids.append(pid)
            stack.extend(children.get(pid, ()))
        found[root] = Tree(tuple(pids), sum(resident[pid] for pid in pids), zombies.get(root, 0))
    return found


def end_all(pid: int, token: str, patience_s: float = 5.0) -> None:
    """Kill the session led by `pid`, its descendants, and everything that carries `token`."""
    _kill_group(pid)
    if not _PROC.is_dir():
        return
    for descendant in trees([pid])[pid].pids:
        _kill(descendant)
    deadline = time.monotonic() + patience_s
    while (left := _carrying(token)) and time.monotonic() < deadline:
        for escaped in left:
            _kill_group(escaped)
            _kill(escaped)
        time.sleep(0.005)


def describe_end(status: int) -> str:
    """What became of a process, from the status Python gives it."""
    if status >= 0:
        return f"ended its process with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}" + (
        " (often the kernel, out of memory)" if -status == signal.SIGKILL else ""
    )


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of_machine() -> int:
    """Bytes this process could have at most: the machine's memory, or less in a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(name).read_text()))
    return total


def _walk() -> list[tuple[int, int, int | None]]:
    """(pid, parent, resident pages) of every process; no pages for one that has ended and waits to be
    collected."""
    rows: list[tuple[int, int, int | None]] = []
    try:
        names = os.listdir(_PROC)
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # ended meanwhile
            continue
        ended = fields[0] in (b"Z", b"X")
        rows.append((int(name), int(fields[1]), None if ended else int(fields[21])))
    return rows


def _carrying(token: str) -> list[int]:
    word = token.encode()
    found = []
    for pid, _, pages in _walk():
        if pages is None or pid == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # ended, or another user's
            continue
        if word in environment:
            found.append(pid)
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    if pid in (0, 1, os.getpgrp()):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
