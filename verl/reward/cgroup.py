"""Memory limits by cgroup v2, where we may create groups: the kernel counts all that processes hold, shared memory and
socket buffers included.

A group is created beside our own, because a cgroup that has processes cannot have children with limits. Where that is
not allowed (most containers, batch systems, cgroup v1) callers count memory themselves.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import time
from pathlib import Path

_PROBE_BYTES = 64 << 20
_NOBODY = 65534


class Group:
    """One cgroup with a memory limit, removed by `close` with every process in it."""

    def __init__(self, parent: Path, memory_bytes: int, max_processes: int | None = None) -> None:
        self.path = parent / f"verl-{os.getpid()}-{secrets.token_hex(8)}"
        self.path.mkdir()
        try:
            self._write("memory.max", memory_bytes)
            self._write("memory.oom.group", 1)  # no program goes on without a part of itself
            if (self.path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
            if max_processes is not None:
                self._write("pids.max", max_processes)
            self.entrance = os.open(self.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.path.rmdir()
            raise

    def ran_out_of_memory(self) -> bool:
        with contextlib.suppress(OSError):
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def close(self, patience_s: float = 5.0) -> None:
        os.close(self.entrance)
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)  # Linux 5.14; before, only what the caller has killed is gone
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                return self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # its last process is still ending
                time.sleep(0.002)

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


def create(memory_bytes: int, max_processes: int | None = None) -> Group | None:
    """A new group; None where there can be none."""
    parent = usable_parent()
    if parent is not None:
        with contextlib.suppress(OSError):  # as many groups as the parent allows are there already
            return Group(parent, memory_bytes, max_processes)
    return None


def sweep() -> None:
    """Remove empty groups whose creator was killed before it could."""
    parent = usable_parent()
    for path in [] if parent is None else parent.glob("verl-*-*"):
        if not os.path.exists(f"/proc/{path.name.split('-')[1]}"):
            with contextlib.suppress(OSError):
                path.rmdir()


def join(entrance: int) -> None:
    """Move this process, and so whatever it starts, into the group whose `entrance` was inherited."""
    os.write(entrance, b"0")
    os.close(entrance)


@functools.cache
def usable_parent() -> Path | None:
    """The cgroup in which we can limit others; found out once, by moving an unprivileged process into a new group."""
    own = _own()
    for folder in [] if own is None else [own, own.parent]:
        with contextlib.suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                group = Group(folder, _PROBE_BYTES)
                try:
                    drop = (
                        {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
                    )
                    subprocess.run(
                        ["/bin/sh", "-c", "echo 0"],
                        stdout=group.entrance,
                        stderr=subprocess.DEVNULL,
                        check=True,
                        **drop,  # type: ignore[call-overload]
                    )
                    return folder
                except subprocess.SubprocessError:
                    pass
                finally:
                    group.close()
    return None


def _own() -> Path | None:
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
