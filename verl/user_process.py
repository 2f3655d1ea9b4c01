"""Python processes that run what others wrote (rewards, tools, environments, probes) and can be killed at any time.

A process loads what it serves once, then answers requests: pickled requests, answers as lines of JSON, over a socket
that is separate from stdout, so that what it prints is never taken for an answer and nothing that comes out of it is
unpickled. A supervisor above it ends whatever it started. The process serves on its own socket, or forks another for
every descriptor it is sent, which shares what was loaded.

The first half is the trainer's end; the second half, from `main` on, runs in the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from verl import processes
from verl.errors import VerlError
from verl.json_input import parse_json
from verl.user_code import error_line

HEADER = struct.Struct(">I")
"""The length of a message to a process, before the message."""
_BROKEN = "broke the connection to the trainer and was killed"
_OUTPUT_TAIL = 2000
_SHOWN_LINES = 50
_MAIN = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from verl.user_process import main; main(*map(int, sys.argv[1].split()))"
)


class Connection(asyncio.Protocol):
    """The trainer's end of one process."""

    max_line = 1 << 30
    """Bytes of the longest answer."""

    def __init__(self) -> None:
        self.ended = ""
        """How; empty while it runs."""
        self.answers = 0
        self.closed_by_process = False
        self.over = asyncio.Event()
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        """Of a line that has not ended yet."""
        self._size = 0
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        """The first message, then that of the last request; empty where the process ended before."""

    async def connect(self, channel: socket.socket) -> None:
        self._socket = channel
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=channel)

    def send(self, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(HEADER.pack(len(payload)) + payload)

    async def request(self, payload: bytes, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None at the deadline, and the process is killed. An answer that came in time counts, however long
        the event loop was busy with something else."""
        if self.ended:
            return {}
        self._answer = asyncio.get_running_loop().create_future()
        self.send(payload)
        try:
            await asyncio.wait([self._answer], timeout=timeout_s)
        except asyncio.CancelledError:
            self.end("was cancelled")  # its answer must not be taken for that of the next request
            raise
        if not self._answer.done():
            self.end(f"did not answer within {timeout_s:g} s and was stopped")
            return None
        self.answers += 1
        return self._answer.result()

    def end(self, how: str) -> None:
        """Close the connection; the supervisor of a forked process then kills it with everything it started."""
        if self.ended:
            return
        self.ended = how
        self.over.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # not only closed: a process we forked may hold it too
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._transport is not None:
            self._transport.abort()
        if not self._answer.done():
            self._answer.set_result({})

    def received(self, message: dict[str, Any]) -> None:
        self._answer.set_result(message)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole, self._parts, self._size = b"".join([*self._parts, line]), [], 0
            try:
                message = dict(parse_json(whole))
                if "end" in message:
                    self.end(str(message["end"]))
                elif not self.ended:
                    self.received(message)
            except (ValueError, KeyError, TypeError, asyncio.InvalidStateError):
                self.end(_BROKEN)
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > self.max_line:
            self.end("sent too long an answer and was killed")

    def connection_lost(self, error: Exception | None) -> None:
        self.closed_by_process = not self.ended
        self.end(_BROKEN)


class PythonProcess(Connection):
    """A Python process under a supervisor. The kernel ends it with the thread that created it; `kill` before that, in
    the event loop it was created in. It logs what the process prints, or only keeps the last of it (`log=None`)."""

    def __init__(
        self,
        log: logging.Logger | None,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`inherited`: descriptors whose numbers `main` gets."""
        super().__init__()
        self._log = log
        self._tail = self._partial = b""
        self._shown = 0
        self.socket, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), *inherited]
            numbers = " ".join(map(str, descriptors))
            # -u: what it printed is known even if it ends at once.
            command = [sys.executable, "-u", "-P", "-c", _MAIN, numbers, json.dumps(sys.path)]
            self.process = subprocess.Popen(
                processes.supervised_command(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                pass_fds=descriptors,
            )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        asyncio.get_running_loop().add_reader(self.output, self.read_output)

    async def load(
        self, service: str, argument: Any, error: type[VerlError], forks: bool = False, timeout_s: float = 600
    ) -> Any:
        """Call the function `service` (module:function) there, which returns a `Service`; its description. A VerlError
        there is an `error` here. None: the process has ended meanwhile (`how_it_ended`)."""
        await self.connect(self.socket)
        self.send(pickle.dumps((service, argument, forks)))
        await asyncio.wait([self._answer], timeout=timeout_s)
        if not self._answer.done():
            self.end(f"took longer than {timeout_s:g} s")
        message = self._answer.result()
        if "error" in message:
            raise error(message["error"])
        return message.get("loaded")

    def data_received(self, data: bytes) -> None:
        self.read_output()  # what a call printed is logged before its result arrives
        super().data_received(data)

    async def how_it_ended(self) -> str:
        """In words, with the last line it printed; after the end of the connection."""
        how = self.ended
        if self.closed_by_process:
            await self._wait(3.0)
            status = self.process.returncode
            how = _BROKEN if status is None else processes.describe_exit(status)
        while self.read_output():
            pass
        last = self.last_line()
        return f"{how}; last output: {last}" if last else how

    async def _wait(self, timeout_s: float) -> None:
        """Until the process has ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.002)

    async def kill(self) -> None:
        """With everything it started. Safe to call again, also after it was cancelled."""
        self.end("was closed")
        self.process.terminate()
        await self._wait(5.0)
        if self.process.returncode is None:  # its supervisor was stopped, or something hangs in the kernel
            processes.kill_tree(self.process.pid)
            self.process.wait()
        if not self.output.closed:
            while self.read_output():
                pass
            asyncio.get_running_loop().remove_reader(self.output)
            self.output.close()
            self.socket.close()

    def read_output(self) -> bool:
        """Log what was printed; whether there was anything."""
        data = None if self.output.closed else self.output.read(1 << 16)
        if data is None:
            return False
        self._tail = (self._tail + data)[-_OUTPUT_TAIL:]
        if not data:
            asyncio.get_running_loop().remove_reader(self.output)
        if self._log is None or (self._shown > _SHOWN_LINES and not self._log.isEnabledFor(logging.DEBUG)):
            return bool(data)  # an endless flood should cost little
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data or len(self._partial) > _OUTPUT_TAIL:
            lines, self._partial = [*lines, self._partial], b""
        for line in filter(None, lines):
            self._shown += 1
            level = logging.INFO if self._shown <= _SHOWN_LINES else logging.DEBUG
            self._log.log(level, "%s", line[:500].decode(errors="replace"))
            if self._shown == _SHOWN_LINES:
                self._log.info("(further output of this process is logged at level DEBUG)")
        return bool(data)

    def last_line(self) -> str:
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else ""


# ---- in the processes


@dataclass(frozen=True)
class Service:
    """What a process does."""

    answer: Callable[..., Coroutine[Any, Any, Mapping[str, Any]]]
    """Called with a request; what it returns is sent as JSON. SystemExit ends the process."""
    description: Any = None
    """Sent as JSON when everything is loaded."""
    concurrent: bool = False
    """Requests are answered at the same time, inside one event loop; otherwise one after the other."""


class Steps:
    """Runs one coroutine after the other. What comes before the first await runs outside the event loop and so may run
    one of its own (`asyncio.run`); the first await must be `asyncio.sleep(0)`."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._used = False

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        self._used = True
        return self._runner.run(coroutine)  # goes on after its first await

    def wait_readable(self, channel: socket.socket) -> None:
        """Let tasks that an earlier coroutine left go on until there is something to read."""

        async def wait() -> None:
            loop, readable = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(channel, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(channel)

        if self._used:
            self._runner.run(wait())

    def close(self) -> None:
        self._runner.close()


def main(channel_fd: int, cgroup_fd: int | None = None) -> None:
    """Load what the first message names, and serve until the trainer closes the socket."""
    processes.die_with_parent()
    if cgroup_fd is not None:
        os.write(cgroup_fd, b"0")
        os.close(cgroup_fd)
    channel = socket.socket(fileno=channel_fd)
    # The trainer may be finished before this process has started.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if (setup := next(_requests(channel), None)) is None:
            return
        name, argument, forks = pickle.loads(setup)
        if not forks:
            processes.prefer_as_oom_victim()
        try:
            module, _, function = name.partition(":")
            service: Service = getattr(importlib.import_module(module), function)(argument)
        except VerlError as error:
            channel.sendall(_line({"error": str(error)}))
            return
        channel.sendall(_line({"loaded": service.description}))
        if not forks:
            _serve_and_exit(channel, service)
        _fork_for_every_descriptor(channel, service)


def _fork_for_every_descriptor(control: socket.socket, service: Service) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children that have ended
    gc.freeze()  # garbage collection in a forked process neither scans nor copies these pages
    server = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if not descriptors:
            continue  # no descriptor left for it here: the trainer sees that it was closed
        _flush()
        with socket.socket(fileno=descriptors[0]) as channel:
            try:
                if os.fork() == 0:
                    control.close()
                    _supervise(channel, service, server)
            except OSError as error:
                _say_end(channel, f"could not be started ({error})")


def _supervise(channel: socket.socket, service: Service, server: int) -> NoReturn:
    """In a forked process: fork once more, and end together with the second process."""

    def start() -> None:
        os.setsid()  # signals to the group of a call do not reach the supervisor
        processes.die_with_parent()
        processes.prefer_as_oom_victim()
        channel.sendall(_line({"started": os.getpid()}))
        _serve_and_exit(channel, service)

    try:
        status = processes.supervise(start, server, channel.fileno())
        how = processes.describe_exit(os.waitstatus_to_exitcode(status))
    except OSError as error:
        how = f"could not be started ({error})"
    _say_end(channel, how)
    os._exit(0)


def _serve_and_exit(channel: socket.socket, service: Service) -> NoReturn:
    """Ends at once: threads and exit handlers of what was loaded must not delay it."""
    code = 1
    try:
        if service.concurrent:
            asyncio.run(_serve_concurrently(channel, service))
        else:
            _serve(channel, service)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except ConnectionError:
        code = 0  # the trainer has closed it
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}{error_line(error)}\n")
    finally:
        _flush()
        os._exit(code & 0xFF)


def _serve(channel: socket.socket, service: Service) -> None:
    pid = os.getpid()
    with contextlib.closing(Steps()) as steps:
        for request in _requests(channel, steps):
            answer = steps.run(service.answer(*pickle.loads(request)))
            if os.getpid() != pid:
                os._exit(0)  # a child that the call forked and that returned: the parent answers
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm the call left must not hit the next one
            _flush()
            channel.sendall(_line(answer))


async def _serve_concurrently(channel: socket.socket, service: Service) -> None:
    pid, running = os.getpid(), set[asyncio.Task[None]]()
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    # A child that a call forks runs this loop till its coroutine has returned: what arrives meanwhile is not for it.
    silent = socket.socketpair()
    silent[0].setblocking(False)
    os.register_at_fork(after_in_child=lambda: os.dup2(silent[0].fileno(), channel.fileno()))

    async def run(request: tuple[Any, ...]) -> None:
        answer = await service.answer(*request)
        if os.getpid() != pid:
            os._exit(0)  # as in `_serve`
        _flush()
        writer.write(_line(answer))

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            call = asyncio.create_task(run(pickle.loads(await reader.readexactly(length))))
            running.add(call)
            call.add_done_callback(running.discard)


def _requests(channel: socket.socket, steps: Steps | None = None) -> Iterator[bytes]:
    """What the trainer sends, one message after the other, until it closes the socket."""
    received = bytearray()
    while True:
        while len(received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(received)[0]
            if len(received) < end:
                break
            message = bytes(received[HEADER.size : end])
            del received[:end]
            yield message
        if steps is not None:
            steps.wait_readable(channel)
        data = channel.recv(1 << 16)
        if not data:
            return
        received += data


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _say_end(channel: socket.socket, how: str) -> None:
    with contextlib.suppress(OSError):  # the trainer may have closed it
        channel.settimeout(1.0)
        channel.sendall(_line({"end": how}))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have replaced or closed it
            stream.flush()
