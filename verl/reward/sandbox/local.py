"""The local sandbox: bubblewrap around one Python process.

A program has no network, no file of the host but a read-only /usr and the interpreter, a small scratch folder in
memory, no view of other processes, limits set before its first line runs, and an unprivileged user even under root.
Whatever it started is gone when `run` returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import re
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from verl import memory, processes
from verl.config.sections.reward import SandboxConfig
from verl.errors import RewardError
from verl.reward.sandbox import seccomp
from verl.reward.sandbox.program import End, Outcome, Program

OUTPUT_LIMIT = 4 << 20
_ERROR_LIMIT = 64 << 10
_NOBODY = 65534
_WATCH_S = 0.1
_START_LIMIT_S = 30.0
_SOURCE = "/solution.py"
_SCRATCH = "/scratch"
_WRITABLE = (_SCRATCH, "/dev/shm")
_INODE_BYTES = 1024  # what the kernel keeps for one name in a tmpfs, at most
# Runs first inside the sandbox, with nothing but the standard library: set limits that cannot be raised again, then
# become the program.
_LAUNCH = """
import json, os, resource, sys
job = json.loads(sys.argv[1])
if job["cgroup"] is not None:
    os.write(job["cgroup"], b"0")
    os.close(job["cgroup"])
for name, value in job["limits"].items():
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (value, value))
with open(job["source"], encoding="utf-8") as file:
    source = file.read()
os.write(job["started"], b"1")
os.close(job["started"])
sys.argv = ["solution.py"]
space = {"__name__": "__main__", "__builtins__": __builtins__, "__file__": "solution.py"}
code = compile(source, "solution.py", "exec")
del job, name, value, number, hard, file, source
exec(code, space)
"""


def run(program: Program, limits: SandboxConfig) -> Outcome:
    """Run in isolation; RewardError where the machine does not allow it."""
    problem = why_unavailable()
    if problem is None:
        return _run(program, limits, isolated=True)
    if limits.allow_unisolated:
        return _run(program, limits, isolated=False)
    raise RewardError(refusal(problem))


def refusal(problem: str) -> str:
    return (
        f"Model-written code cannot be isolated here: {problem}. Either {remedy()}, set reward.sandbox_fusion.url=URL "
        f"or, only on an expendable machine, reward.sandbox.allow_unisolated=True."
    )


def remedy() -> str:
    """What makes isolation possible on this machine."""
    if sys.platform != "linux":
        return "use a Linux machine"
    if find_bwrap() is None:
        return "install bubblewrap (apt-get install bubblewrap)"
    if find_python() is None:
        return "install a Python that every user may run (apt-get install python3)"
    return (
        "permit user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0; in a container, start it with "
        "--security-opt seccomp=unconfined)"
    )


@functools.cache
def why_unavailable() -> str | None:
    """Why programs cannot be isolated here; None when they can. Found out once, by running one."""
    if sys.platform != "linux":
        return f"it needs Linux namespaces, and this is {sys.platform}"
    if find_bwrap() is None:
        return "bubblewrap (the program bwrap) is not installed"
    if find_python() is None:
        return "no Python that an unprivileged user may run in sys.base_prefix or /usr/bin"
    outcome = _run(Program("print('inside')"), SandboxConfig(timeout_s=20.0), isolated=True)
    if outcome.end == "ok" and outcome.stdout == "inside\n":
        return None
    return f"bubblewrap does not work on this machine: {outcome.stderr.strip()[-300:] or outcome.end}"


def find_bwrap() -> str | None:
    """bubblewrap by its absolute path: it is started with an environment that has no PATH."""
    found = shutil.which("bwrap")
    return None if found is None else os.path.abspath(found)


@functools.cache
def find_python() -> str | None:
    """A Python that the sandbox's user may run: ours, else the system's."""
    dropping = os.geteuid() == 0
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (f"{sys.base_prefix}/bin/{version}", "/usr/bin/python3", "/usr/local/bin/python3"):
        real = Path(os.path.realpath(candidate))
        if not real.is_file() or not os.access(real, os.X_OK):
            continue
        if not dropping or all(path.stat().st_mode & 0o001 for path in (real, *real.parents)):
            return str(real)
    return None


def _run(program: Program, limits: SandboxConfig, isolated: bool) -> Outcome:
    with contextlib.ExitStack() as stack:
        started_here, started_there = _pipe(stack)
        info_here, info_there = _pipe(stack)
        cgroup = memory.MemoryCgroup.create(limits.memory_limit_mb << 20, limits.max_processes)
        cgroup_fd = None
        if cgroup is not None:
            stack.callback(cgroup.close)
            cgroup_fd = cgroup.join_fd
        passed: list[int | None] = [started_there, cgroup_fd]
        environment, drop = {}, {}
        unprivileged = _NOBODY if os.geteuid() == 0 else None
        if isolated:
            inner = _python_arguments(_SOURCE, started_there, cgroup_fd, limits, limits.max_processes)
            source_fd, system_calls = _sealed(stack, program.source), seccomp.program()
            filter_fd = None if system_calls is None else _sealed(stack, system_calls)
            passed += [info_there, source_fd, filter_fd]
            command = _bubblewrap(limits, info_there, source_fd, filter_fd, inner)
            folder = "/"
            if unprivileged is not None:
                drop = {"user": unprivileged, "group": unprivileged, "extra_groups": []}
        else:
            tasks = limits.max_processes + (0 if unprivileged is not None else _own_tasks())
            inner = _python_arguments("solution.py", started_there, cgroup_fd, limits, tasks)
            folder = _scratch(stack, program.source)
            command = processes.supervised_command([find_python() or sys.executable, *inner], unprivileged)
            environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=_sealed(stack, program.stdin),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[descriptor for descriptor in passed if descriptor is not None],
                start_new_session=True,
                cwd=folder,
                env=environment,
                **drop,  # type: ignore[call-overload]
            )
        except OSError as error:
            return Outcome("sandbox", stderr=f"{type(error).__name__}: {error}")
        finally:
            os.close(started_there)
            os.close(info_there)
        watch = _Watch(process, started_here, info_here, limits, check_memory=cgroup is None)
        try:
            end = watch.until_end()
        finally:
            watch.close()
        if cgroup is not None and cgroup.ran_out_of_memory():
            end = "memory"
    if end == "ok" and process.returncode != 0:
        end = "timeout" if process.returncode in (128 + signal.SIGXCPU, -signal.SIGXCPU) else "error"
    return Outcome(
        end if watch.started else "sandbox",
        watch.out.decode(errors="replace"),
        watch.err.decode(errors="replace"),
        process.returncode,
        time.monotonic() - began,
    )


class _Watch:
    """Reads what a program prints until it ends or exceeds a limit. Its time counts from its own first line."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        started_fd: int,
        info_fd: int,
        limits: SandboxConfig,
        check_memory: bool,
    ) -> None:
        """`check_memory`: no cgroup limits the program's memory."""
        self.process = process
        self.started = False
        self.out, self.err = bytearray(), bytearray()
        self._started_fd, self._info_fd = started_fd, info_fd
        self._limits = limits
        self._namespace: _Namespace | None = None
        self._deadline = time.monotonic() + _START_LIMIT_S
        self._next_check = time.monotonic() + _WATCH_S if check_memory else math.inf

    def until_end(self) -> End:
        assert self.process.stdout is not None and self.process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._started_fd, selectors.EVENT_READ, self._start)
            selector.register(self._info_fd, selectors.EVENT_READ, self._find_namespace)
            selector.register(self.process.stdout, selectors.EVENT_READ, self.out.extend)
            selector.register(self.process.stderr, selectors.EVENT_READ, self.err.extend)
            while selector.get_map():
                now = time.monotonic()
                if now >= self._deadline:
                    return "timeout"
                if now >= self._next_check and self._exceeds_memory(now):
                    return "memory"
                for key, _ in selector.select(max(0.0, min(self._deadline, self._next_check) - now)):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                        continue
                    key.data(data)
                    del self.err[:-_ERROR_LIMIT]
                    if len(self.out) > OUTPUT_LIMIT:
                        del self.out[OUTPUT_LIMIT:]
                        return "output"
        try:
            self.process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its output and still runs
            return "timeout"
        return "ok"

    def close(self) -> None:
        """End the program with everything it started."""
        if self._namespace is not None:
            self._namespace.end()
            self.process.kill()
            self.process.wait()
        else:
            processes.kill_supervised(self.process)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _start(self, data: bytes) -> None:
        self.started = True
        self._deadline = time.monotonic() + self._limits.timeout_s

    def _find_namespace(self, data: bytes) -> None:
        found = re.search(rb'"child-pid": *(\d+)', data)
        if found and self._namespace is None:
            with contextlib.suppress(ProcessLookupError):  # it could not be built, and bubblewrap says why
                self._namespace = _Namespace(int(found[1]))

    def _exceeds_memory(self, now: float) -> bool:
        files = 0
        if (
            self._namespace is not None and self.started
        ):  # before that its first process sees the host's files
            files = self._namespace.file_bytes(self._limits)
        pids = [process.pid for process in processes.descendants(self.process.pid)]
        used = processes.resident_bytes(pids, files)
        done = time.monotonic()
        self._next_check = done + max(_WATCH_S, 20 * (done - now))
        return used > (self._limits.memory_limit_mb << 20)


class _Namespace:
    """The process namespace of a program, identified by its first process: all others end with that one."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._pidfd = os.pidfd_open(first)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        gone = select.poll()
        gone.register(self._pidfd, select.POLLIN)
        gone.poll()  # until the last process of the namespace has ended
        os.close(self._pidfd)

    def file_bytes(self, limits: SandboxConfig) -> int:
        """Bytes of the program's files: all folders it can write to are in memory."""
        total = 0
        for folder in _WRITABLE:
            try:
                usage = os.statvfs(f"/proc/{self._first}/root{folder}")
            except PermissionError:
                total += _scratch_limit(limits)
                continue
            except OSError:  # not there yet, or ended
                continue
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize
            total += (usage.f_files - usage.f_ffree) * _INODE_BYTES
        return total


def _scratch_limit(limits: SandboxConfig) -> int:
    return 4 * limits.max_file_mb << 20


def _own_tasks() -> int:
    """Processes and threads of this user: without a namespace of its own, the kernel counts them as the program's."""
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                total += process.num_threads()
    return total


def _python_arguments(
    source: str, started_fd: int, cgroup_fd: int | None, limits: SandboxConfig, tasks: int
) -> list[str]:
    """Python's arguments for launching the file `source` (a path as the sandbox sees it); `cgroup_fd` is the `join_fd`
    of its cgroup, `tasks` how many processes and threads its user may have."""
    resources = {
        "AS": limits.memory_limit_mb << 20,
        "CPU": int(limits.timeout_s) + 1,
        "NPROC": tasks,
        "FSIZE": limits.max_file_mb << 20,
        "NOFILE": 256,
        "MEMLOCK": 0,  # also what zero-copy sends may pin
        "CORE": 0,
    }
    job = {"limits": resources, "source": source, "started": started_fd, "cgroup": cgroup_fd}
    return ["-s", "-B", "-X", "utf8", "-c", _LAUNCH, json.dumps(job)]


def _bubblewrap(
    limits: SandboxConfig, info_fd: int, source_fd: int, filter_fd: int | None, inner: list[str]
) -> list[str]:
    python, bwrap = find_python(), find_bwrap()
    if python is None or bwrap is None:
        raise RewardError(refusal("no usable Python or bwrap was found"))
    command = [bwrap, "--info-fd", str(info_fd), "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session"]
    command += ["--uid", str(_NOBODY), "--gid", str(_NOBODY), "--hostname", "sandbox", "--cap-drop", "ALL"]
    command += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", _SCRATCH]
    command += ["--setenv", "LANG", "C.UTF-8"]
    command += [argument for mount in host_mounts(python) for argument in mount]
    # /dev/zero can be mapped as shared memory that no limit counts; /dev/full reads as zeros too and cannot.
    command += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
    for folder in _WRITABLE:
        command += ["--size", str(_scratch_limit(limits)), "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--symlink", _SCRATCH, "/tmp"]
    command += ["--ro-bind-data", str(source_fd), _SOURCE, "--remount-ro", "/", "--chdir", _SCRATCH]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--", python, *inner]


def host_mounts(python: str) -> Iterator[list[str]]:
    """What of the host is visible: programs and libraries of the system, and the interpreter if it is elsewhere."""
    yield ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/") / name
        if path.is_symlink():
            yield ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            yield ["--ro-bind", str(path), str(path)]
    for extra in ("/etc/ld.so.cache", "/etc/alternatives"):
        yield ["--ro-bind-try", extra, extra]
    prefix = Path(python).parent.parent
    if not prefix.is_relative_to("/usr"):
        yield ["--ro-bind", str(prefix), str(prefix)]


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose reading end is closed with the stack."""
    here, there = os.pipe()
    stack.callback(os.close, here)
    return here, there


def _sealed(stack: contextlib.ExitStack, content: str | bytes) -> int:
    """A read-only file descriptor with this content."""
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    descriptor = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _scratch(stack: contextlib.ExitStack, source: str) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-code-", ignore_cleanup_errors=True))
    Path(folder, "solution.py").write_text(source, encoding="utf-8", errors="surrogatepass")
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)
        os.chmod(Path(folder, "solution.py"), 0o644)
    return folder


def describe() -> str:
    """How programs are isolated and limited on this machine."""
    problem = why_unavailable()
    isolation = f"no isolation ({problem})"
    if problem is None:
        isolation = f"bubblewrap works, {'with' if seccomp.program() else 'without'} a system call filter"
    limit = "a cgroup" if memory.cgroup_parent() else "a check every 0.1 s (no cgroup v2 to create groups in)"
    return f"{isolation}; memory is limited by {limit}"
