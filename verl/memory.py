"""Memory of the host and of GPUs: the one reader for every budget, and limits for other processes. Imports torch only
when asked about a GPU."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

_NOBODY = 65534
_CGROUP_PROBE_BYTES = 64 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)  # v2, v1


def free_host_bytes() -> int:
    """Bytes this process can still allocate: what the system has available, within the limits of its cgroups."""
    free = int(psutil.virtual_memory().available)
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return free
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            group = _CGROUPS / controllers / path.lstrip("/")
            inside = [each for each in (group, *group.parents) if each.is_relative_to(_CGROUPS)]
            free = min([free, *(free_in_cgroup(each, free) for each in inside)])
    return free


def host_memory_limit() -> int:
    """Bytes this process could have at most: the machine's memory, or less in a container."""
    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # v2, v1
        with suppress(OSError, ValueError):
            total = min(total, int((_CGROUPS / name).read_text()))
    return total


def free_in_cgroup(group: Path, otherwise: int) -> int:
    """What a cgroup may still allocate; cached files do not count, since the kernel drops them when needed."""
    for names in _CGROUP_FILES:
        try:
            limit, used = (int((group / name).read_text()) for name in names)
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # there is no such file, or the limit is "max"
            continue
        return max(limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0))), 0)
    return otherwise


def free_device_bytes(device: torch.device | str | int | None = None) -> int:
    """Bytes of a CUDA device that no process has allocated, not counting what torch keeps cached for reuse."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Device or host: torch has its own class on devices and a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


class MemoryCgroup:
    """A cgroup (v2) with a memory limit: the kernel counts everything its processes hold and kills them together."""

    def __init__(self, parent: Path, memory_bytes: int, max_processes: int | None = None) -> None:
        self.path = parent / f"verl-{os.getpid()}-{os.urandom(8).hex()}"
        self.path.mkdir()
        try:
            self._write("memory.max", memory_bytes)
            self._write("memory.oom.group", 1)
            if (self.path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
            if max_processes is not None:
                self._write("pids.max", max_processes)
            self.join_fd = os.open(self.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            """Inherited by a child, which joins, with whatever it starts, by writing b"0" to it."""
        except BaseException:
            self.path.rmdir()
            raise

    @classmethod
    def create(cls, memory_bytes: int, max_processes: int | None = None) -> MemoryCgroup | None:
        """A new group; None where we may not create one (most containers, cgroup v1)."""
        parent = cgroup_parent()
        if parent is not None:
            with suppress(OSError):  # as many groups as the parent allows are there already
                return cls(parent, memory_bytes, max_processes)
        return None

    def pids(self) -> list[int]:
        """The processes in it."""
        with suppress(OSError):
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        return []

    def ran_out_of_memory(self) -> bool:
        with suppress(OSError):
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Kill what is in the group and remove it; also empty groups whose creator was killed."""
        os.close(self.join_fd)
        with suppress(OSError):
            self._write("cgroup.kill", 1)  # Linux 5.14
        deadline = time.monotonic() + timeout_s
        while self.path.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # its last process is still ending
                self.path.rmdir()
            time.sleep(0.002)
        for path in self.path.parent.glob("verl-*-*"):
            if not psutil.pid_exists(int(path.name.split("-")[1])):
                with suppress(OSError):
                    path.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


@functools.cache
def cgroup_parent() -> Path | None:
    """The cgroup in which we can create limited ones; found out once, by moving an unprivileged process into a new one.

    Groups are created as siblings of our own, because a cgroup that has processes cannot have children with limits."""
    own = _own_cgroup()
    drop: dict[str, Any] = (
        {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    )
    for folder in [] if own is None else [own, own.parent]:
        with suppress(OSError, subprocess.SubprocessError):
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
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        inside = next((line[3:] for line in lines if line.startswith("0::")), None)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, kind = line.partition(" - ")
            if inside is not None and kind.startswith("cgroup2 "):
                root, point = mount.split()[3:5]
                return Path(point, Path(inside).relative_to(root))
    return None
