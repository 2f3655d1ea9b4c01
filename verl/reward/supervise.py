"""Runs one command and ends with its status, after every process the command started has ended.

The supervisor is a child subreaper (Linux): whatever loses its parent becomes its child, however it detached, so it has
no children left only when no process is left. It is executed as a file by a bare interpreter and imports nothing but
the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def command_line(command: Sequence[str], user: int | None = None) -> list[str]:
    """Arguments that run `command` under a supervisor; `user` is the id it runs as, where we are root."""
    job = json.dumps({"parent": os.getpid(), "user": user})
    return [sys.executable, "-I", "-S", __file__, job, *command]


def descendants(root: int, rows: list[tuple[int, int, bool]] | None = None) -> list[int]:
    """The live processes below `root`, from `processes()`; none are found on systems without /proc."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for pid, parent, ended in processes() if rows is None else rows:
        children.setdefault(parent, []).append((pid, ended))
    found, stack = [], list(children.get(root, ()))
    while stack:
        pid, ended = stack.pop()
        if not ended:
            found.append(pid)
        stack.extend(children.get(pid, ()))  # of one that ended too: they were read before they were adopted
    return found


def processes() -> list[tuple[int, int, bool]]:
    """(pid, parent, whether it has ended and only waits to be collected) of every process."""
    rows = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # ended meanwhile
            continue
        rows.append((int(name), int(fields[1]), fields[0] in (b"Z", b"X")))
    return rows


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def kill(pid: int) -> None:
    """Kill a process, with its group where it leads one: the kernel ends a group at once, also while it forks."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def _supervise(parent: int, user: int | None, command: list[str]) -> int:
    """The wait status of the command."""
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave no status of children
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent:  # it ended before it was asked for
        return 0
    child = os.fork()
    if child == 0:
        _become(command, user)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # who waits for the end of the command's output must not wait for us
        os.dup2(null, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    status = None
    while status is None and signal.sigwait(awaited) != signal.SIGTERM:
        status = _collect()[0].get(child)
    return _end_descendants(child, status)


def _become(command: list[str], user: int | None) -> None:
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


def _collect() -> tuple[dict[int, int], bool]:
    """Collect the children that have ended: their wait statuses, and whether any child is left."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:
        return ended, False
    return ended, True


def _end_descendants(child: int, status: int | None) -> int:
    """Kill until none is left: what loses its parent in one round is a child of ours in the next."""
    if not os.path.isdir("/proc"):
        kill(child)
    left = True
    while left:
        for pid in descendants(os.getpid()):
            kill(pid)
        ended, left = _collect()
        status = ended.get(child) if status is None else status
        time.sleep(0.002)
    return signal.SIGKILL if status is None else status


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    _end_as(_supervise(job["parent"], job["user"], sys.argv[2:]))
