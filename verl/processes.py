"""Processes: find, watch, limit and kill them, with everything they started.

A child started with `supervised_command` runs below a supervisor, which adopts its orphans: killing the supervisor ends
them all, and so does the death of the process that started it. The supervisor is this file, executed by a bare
interpreter: its part uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

if __name__ != "__main__":  # the supervisor has no site-packages, and should start quickly
    import re
    import subprocess
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IPC_RMID = 0
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # now: a forked child must not load libraries


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
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


# ---- killing


def kill_tree(pid: int, timeout_s: float = 5.0) -> None:
    """Kill a process with all its descendants. It is stopped first, so that it starts no new ones meanwhile."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while (below := descendants(pid)) and time.monotonic() < deadline:
        for process in below:
            _kill(process.pid)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill(pid: int) -> None:
    for send in (os.killpg, os.kill):  # a group ends at once, also while it forks
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


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


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(option, value, 0, 0, 0)


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
    bare = [sys.executable, "-I", "-S", __file__]
    return [*bare, str(os.getpid()), "" if user is None else str(user), *command]


def kill_supervised(process: subprocess.Popen[bytes], timeout_s: float = 5.0) -> None:
    """Kill a supervised command with everything it started, and wait for its end."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:  # it was stopped, or something below it is stuck in the kernel
        kill_tree(process.pid, timeout_s)
        process.wait()


def supervise(start: Callable[[], None], parent: int, channel: int | None = None) -> int:
    """Fork, call `start` in the child, and run until every process it started has ended; the child's wait status. The
    death of `parent`, SIGTERM, and the end of the connection `channel` kill them all.

    A child subreaper adopts whatever loses its parent, however it detached: no process is left when it has no children
    left."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signals = (signal.SIGCHLD, signal.SIGTERM)
    for number in signals:
        signal.signal(number, lambda *_: None)  # `wake` gets the number
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent:  # the parent died before PDEATHSIG was set
        return 0
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        os.close(woken)
        os.close(wake)
        start()
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # readers of the child's pipes must see their end when the child ends
        os.dup2(null, standard)
    kept = sorted(descriptor for descriptor in (woken, wake, channel) if descriptor is not None)
    for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    if channel is not None:
        poll.register(channel, 0)  # only its end
    status = None
    while status is None:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if channel in ready or (woken in ready and signal.SIGTERM in os.read(woken, 4096)):
            break
        status = _reap()[0].get(child)
    return _kill_children(child, status)


def _exec(command: list[str], user: int | None) -> None:
    try:
        os.setsid()  # signals to the command's group do not reach the supervisor
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if user is not None:
            os.setgroups(())
            os.setgid(user)
            os.setuid(user)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)


def _reap() -> tuple[dict[int, int], bool]:
    """Wait statuses of the children that have ended, and whether any child is left."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:
        return ended, False
    return ended, True


def _kill_children(child: int, status: int | None) -> int:
    """Kill until none is left: what loses its parent in one round is a child of ours in the next."""
    while True:
        ended, left = _reap()
        status = ended.get(child) if status is None else status
        if not left:
            return signal.SIGKILL if status is None else status
        for pid in _child_pids() if os.path.isdir("/proc") else [child]:
            _kill_with_group(pid)
        time.sleep(0.002)


def _kill_with_group(pid: int) -> None:
    """A group ends at once, also while it forks and after its first process has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _child_pids() -> list[int]:
    """As `descendants` of this process, without psutil."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may end meanwhile
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, stack = [], [os.getpid()]
    while stack:
        below = children.get(stack.pop(), [])
        found += below
        stack += below
    return found


def _exit_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


# ---- resources


def usable_cores() -> int:
    """CPU cores this process may run on: a batch system's share, not all the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def open_memory_bytes(pids: Iterable[int]) -> int:
    """Bytes of the memfds and files in /dev/shm that processes have open, mapped or not; each counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # it may have ended
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith(("/memfd:", "/dev/shm/")):
                        status = os.stat(entry.path)
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def sysv_segments(creators: Collection[int]) -> dict[int, int]:
    """System V shared memory that these processes created, also those that have ended: resident bytes by id."""
    with contextlib.suppress(OSError):
        names, *lines = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines())
        segments = [dict(zip(names, map(int, line), strict=True)) for line in lines]
        return {each["shmid"]: each["rss"] for each in segments if each["cpid"] in creators}
    return {}


def remove_sysv_segments(creators: Collection[int]) -> None:
    """The kernel keeps them when their creators end."""
    for segment in sysv_segments(creators):
        assert _LIBC is not None
        _LIBC.shmctl(segment, _IPC_RMID, None)


if __name__ == "__main__":
    _parent, _user, *_command = sys.argv[1:]
    _exit_as(supervise(lambda: _exec(_command, int(_user) if _user else None), int(_parent)))
