"""The processes of a worker or of a sandboxed program: what they use, and how all of them are ended.

A worker runs under a supervisor that adopts its orphans (`supervise.py`), a sandboxed program in a process namespace:
in both cases every process that was started is a descendant of the one we started. On systems without /proc only the
process group is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl.reward import supervise

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Tree:
    """The descendants of a process that we started."""

    pids: tuple[int, ...]
    zombies: int


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only."""
    supervise.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_first_when_memory_is_short() -> None:
    """When the machine runs out of memory, the kernel should take this process and not the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def trees(roots: list[int]) -> dict[int, Tree]:
    """Every root's descendants, from one walk over /proc."""
    rows = supervise.processes()
    found = {}
    for root in roots:
        pids = supervise.descendants(root, rows)
        found[root] = Tree(tuple(pids), sum(ended and parent in pids for _, parent, ended in rows))
    return found


def memory(pids: Iterable[int], files: int | None = None) -> int:
    """Bytes that processes hold: private and file pages of each, and shared memory once, whether it is mapped or not.

    `files` are the bytes of the only tmpfs these processes can write to; None where they may have any shared memory.
    """
    pids = list(pids)
    own = mapped = 0
    for pid in pids:
        resident, shared = _resident(pid)
        own += resident - shared
        mapped += shared
    return own + max(mapped, _open_shared_memory(pids) if files is None else files)


def end_supervised(supervisor: subprocess.Popen[bytes], patience_s: float = 5.0) -> None:
    """End a supervisor and everything below it; it ends by itself when nothing is left there."""
    supervisor.terminate()
    try:
        supervisor.wait(patience_s)
    except subprocess.TimeoutExpired:  # it was stopped, or something below it is stuck in the kernel
        end_tree(supervisor, patience_s)


def end_tree(process: subprocess.Popen[bytes], patience_s: float = 5.0) -> None:
    """Kill a process with all its descendants. It is stopped first, so that it neither collects nor starts any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + patience_s
    while (pids := supervise.descendants(process.pid)) and time.monotonic() < deadline:
        for pid in pids:
            supervise.kill(pid)
        time.sleep(0.002)
    supervise.kill(process.pid)
    process.wait()


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


def _resident(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and how many of them are shared memory; nothing for one that has ended."""
    found = {b"VmRSS": 0, b"RssShmem": 0}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name in found:
                found[name] = int(value.split()[0]) << 10
    return found[b"VmRSS"], found[b"RssShmem"]


def _open_shared_memory(pids: list[int]) -> int:
    """Bytes of the shared memory that processes have open (memfd, /dev/shm) or created (System V), mapped or not."""
    objects: dict[tuple[int, int], int] = {}
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{name}").startswith(("/memfd:", "/dev/shm/")):
                        info = os.stat(f"{folder}/{name}")
                        if stat.S_ISREG(info.st_mode):
                            objects[info.st_dev, info.st_ino] = 512 * info.st_blocks
    total = sum(objects.values())
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/sysvipc/shm", encoding="ascii") as file,
    ):
        names = file.readline().split()
        creator, sizes = names.index("cpid"), (names.index("rss"), names.index("swap"))
        for fields in map(str.split, file):
            if int(fields[creator]) in pids:
                total += sum(int(fields[column]) for column in sizes)
    return total
