"""Runs one command and exits with its status once every process the command started has ended.

It is a child subreaper (Linux): whatever loses its parent becomes its child, however it detached, so no process is left
when it has no children left. It ends with the process that started it. Executed as a file by a bare interpreter, hence
the standard library only.
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

PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; does nothing elsewhere than on Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _supervise(parent: int, user: int | None, command: list[str]) -> int:
    """The wait status of the command."""
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, children would leave no status
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent:  # the parent died before PDEATHSIG was set
        return 0
    child = os.fork()
    if child == 0:
        _exec(command, user)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # readers of the command's pipes must see their end when the command ends
        os.dup2(null, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    status = None
    while status is None and signal.sigwait(awaited) != signal.SIGTERM:
        status = _reap()[0].get(child)
    return _kill_descendants(child, status)


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


def _kill_descendants(child: int, status: int | None) -> int:
    """Kill until none is left: what loses its parent in one round is a child of ours in the next."""
    left = True
    while left:
        for pid in _descendants() if os.path.isdir("/proc") else [child]:
            for send in (os.killpg, os.kill):  # a group ends at once, also while it forks
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(pid, signal.SIGKILL)
        ended, left = _reap()
        status = ended.get(child) if status is None else status
        time.sleep(0.002)
    return signal.SIGKILL if status is None else status


def _descendants() -> list[int]:
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


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    _exit_as(_supervise(job["parent"], job["user"], sys.argv[2:]))
