"""Processes: find, watch, limit and kill them, with everything they started.

A child started with `supervised_command` runs below `supervisor`, which adopts its orphans: killing the supervisor
ends them all, and so does the death of the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from verl.processes import supervisor

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_NOBODY = 65534
_CGROUP_PROBE_BYTES = 64 << 20


# ---- finding


def descendants(pid: int) -> list[psutil.Process]:
    """Live processes below `pid`."""
    try:
        return [process for process in psutil.Process(pid).children(recursive=True) if _running(process)]
    except psutil.Error:
        return []


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
    """When a process started, in clock ticks since boot: with the pid it names a process uniquely. 0: not known."""
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


def _running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in _ENDED
    return False


# ---- killing


def kill_tree(pid: int, timeout_s: float = 5.0) -> None:
    """Kill a process with all its descendants. It is stopped first, so that it starts no new ones meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while (below := descendants(pid)) and time.monotonic() < deadline:
        for process in below:
            for send in (os.killpg, os.kill):  # a group ends at once, also while it forks
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(process.pid, signal.SIGKILL)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


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


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. Linux only."""
    supervisor.prctl(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)


def prefer_as_oom_victim() -> None:
    """When the machine runs out of memory, the kernel should kill this process and not the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def describe_exit(status: int) -> str:
    """How a process ended, from its `returncode`."""
    if status >= 0:
        return f"ended its process with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}" + (" (often out of memory)" if -status == signal.SIGKILL else "")


# ---- children under a supervisor


def supervised_command(command: Iterable[str], user: int | None = None) -> list[str]:
    """The command line that runs `command` under a supervisor; `user` is the id to run it as, where we are root."""
    job = json.dumps({"parent": os.getpid(), "user": user})
    return [sys.executable, "-I", "-S", supervisor.__file__, job, *command]


def kill_supervised(process: subprocess.Popen[bytes], timeout_s: float = 5.0) -> None:
    """Kill a supervised command with everything it started, and wait for its end."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except (
        subprocess.TimeoutExpired
    ):  # the supervisor was stopped, or something below it is stuck in the kernel
        kill_tree(process.pid, timeout_s)
        process.wait()


# ---- resources


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_limit() -> int:
    """Bytes this process could have at most: the machine's memory, or less in a container."""
    total = psutil.virtual_memory().total
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(name).read_text()))
    return total


def resident_bytes(pids: Iterable[int], tmpfs_bytes: int = 0) -> int:
    """Bytes that processes hold. `tmpfs_bytes` are those of files in memory, which count whether mapped or not."""
    private = shared = 0
    for pid in pids:
        fields = {b"VmRSS": 0, b"RssShmem": 0}
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # it may have ended
            for line in file:
                name, _, value = line.partition(b":")
                if name in fields:
                    fields[name] = int(value.split()[0]) << 10
        private += fields[b"VmRSS"] - fields[b"RssShmem"]
        shared += fields[b"RssShmem"]
    return private + max(shared, tmpfs_bytes)


class MemoryCgroup:
    """A cgroup (v2) with a memory limit: the kernel counts everything its processes hold and kills them together."""

    def __init__(self, parent: Path, memory_bytes: int, max_processes: int | None = None) -> None:
        self.path = parent / f"verl-{os.getpid()}-{secrets.token_hex(8)}"
        self.path.mkdir()
        try:
            self._write("memory.max", memory_bytes)
            self._write("memory.oom.group", 1)
            if (self.path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
            if max_processes is not None:
                self._write("pids.max", max_processes)
            self.join_fd = os.open(self.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            """Inherited by a child, which joins by writing b"0" to it."""
        except BaseException:
            self.path.rmdir()
            raise

    @classmethod
    def create(cls, memory_bytes: int, max_processes: int | None = None) -> MemoryCgroup | None:
        """A new group; None where we may not create one (most containers, cgroup v1)."""
        parent = cgroup_parent()
        if parent is not None:
            with contextlib.suppress(OSError):  # as many groups as the parent allows are there already
                return cls(parent, memory_bytes, max_processes)
        return None

    def ran_out_of_memory(self) -> bool:
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Kill what is in the group and remove it; also empty groups whose creator was killed."""
        os.close(self.join_fd)
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)  # Linux 5.14
        deadline = time.monotonic() + timeout_s
        while self.path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # its last process is still ending
                self.path.rmdir()
            time.sleep(0.002)
        for path in self.path.parent.glob("verl-*-*"):
            if not psutil.pid_exists(int(path.name.split("-")[1])):
                with contextlib.suppress(OSError):
                    path.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


def join_cgroup(join_fd: int) -> None:
    """Move this process, and so whatever it starts, into the group whose `join_fd` it inherited."""
    os.write(join_fd, b"0")
    os.close(join_fd)


@functools.cache
def cgroup_parent() -> Path | None:
    """The cgroup in which we can create limited ones; found out once, by moving an unprivileged process into a new one.

    Groups are created beside our own, because a cgroup that has processes cannot have children with limits."""
    own = _own_cgroup()
    drop: dict[str, Any] = (
        {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    )
    for folder in [] if own is None else [own, own.parent]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                group = MemoryCgroup(folder, _CGROUP_PROBE_BYTES)
                try:
                    subprocess.run(
                        ["/bin/sh", "-c", "echo 0"],
                        stdout=group.join_fd,
                        stderr=subprocess.DEVNULL,
                        check=True,
                        **drop,
                    )
                    return folder
                finally:
                    group.close()
    return None


def _own_cgroup() -> Path | None:
    """The folder of this process's cgroup in the v2 hierarchy."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        inside = next((line[3:] for line in lines if line.startswith("0::")), None)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if inside is not None and kind.startswith("cgroup2 "):
                root, point = mount.split()[3:5]
                return Path(point, Path(inside).relative_to(root))
    return None
