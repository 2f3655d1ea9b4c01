"""The fork server of the tools and the processes it forks: the trainer's end of each, and the processes themselves.

The server imports what the user wrote once, then forks a process for every descriptor it is sent: a socket on which
that process answers one request after the other, pickled requests with lines of JSON. Above each process a supervisor
holds the same socket: the trainer kills a process, with whatever it started, by closing the connection.
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
import random
import signal
import socket
import sys
import threading
import types
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal, cast

from verl import processes
from verl.agents.base import ToolFailed
from verl.agents.builtin_tools import load_builtin
from verl.agents.tools import Hosted, HostedFactory, load_environment, load_tools, load_user
from verl.child_process import HEADER, PythonChild
from verl.errors import ConfigError, VerlError
from verl.user_code import error_line

MAX_RESULT = 1 << 20
"""Characters of a result that are kept, half of them from its end."""
_MAX_ERROR = 1000
_MAX_LINE = 16 * MAX_RESULT  # the longest answer, every character escaped
_START_LIMIT_S = 600.0

_output_log = logging.getLogger("verl.agents.output")


@dataclass(frozen=True)
class Target:
    """What to import."""

    kind: Literal["builtin", "tools", "environment", "user"]
    spec: str


class ToolProcess(asyncio.Protocol):
    """The trainer's end of one tool process, which answers one request at a time."""

    def __init__(self) -> None:
        self.pid = 0
        self.ended = ""
        """How; empty while it runs."""
        self.answers = 0
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        """Of a line that has not ended yet."""
        self._size = 0
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def connect(self, channel: socket.socket) -> None:
        self._socket = channel
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=channel)

    async def started(self) -> None:
        self.pid = (await self._answer).get("started", 0)

    async def request(self, payload: bytes, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None at the deadline, and the process is killed. An answer that came in time counts, however long
        the event loop was busy with something else."""
        if self.ended:
            return {}
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(HEADER.pack(len(payload)) + payload)
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
        """Kill it with everything it started: its supervisor sees the end of the connection."""
        if self.ended:
            return
        self.ended = how
        if self._socket is not None:
            with contextlib.suppress(OSError):  # not only closed: a process we forked may hold it too
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._transport is not None:
            self._transport.abort()
        if not self._answer.done():
            self._answer.set_result({})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._handle(b"".join([*self._parts, line]))
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > _MAX_LINE:
            self.end("sent too long an answer and was killed")

    def _handle(self, line: bytes) -> None:
        try:
            message = dict(json.loads(line))
            if "end" in message:
                self.end(str(message["end"]))
            elif not self.ended:
                self._answer.set_result(message)
        except (ValueError, TypeError, RecursionError, asyncio.InvalidStateError):
            self.end("broke the connection to the trainer and was killed")

    def connection_lost(self, error: Exception | None) -> None:
        self.end("broke the connection to the trainer and was killed")


class ForkServer(PythonChild):
    """The trainer's end of the fork server (`verl/agents/tool_host.py`)."""

    def __init__(self) -> None:
        super().__init__(__name__, _output_log)
        self.ended = False
        self.loaded: list[tuple[int, dict[str, Any]]] = []
        self._processes: set[ToolProcess] = set()
        asyncio.get_running_loop().add_reader(self.output, self.read_output)

    @classmethod
    async def start(cls, targets: Sequence[Target]) -> ForkServer:
        server = cls()
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                message = await server._import(targets)
            if "loaded" not in message:
                raise ConfigError(
                    message.get("error") or f"Importing {_specs(targets)} {await server.how_it_ended()}."
                )
        except TimeoutError:
            await server.end()
            raise ConfigError(f"Importing {_specs(targets)} took longer than {_START_LIMIT_S:g} s.") from None
        except BaseException:
            await server.end()
            raise
        server.loaded = [(number, info) for number, info in message["loaded"]]
        asyncio.get_running_loop().add_reader(server.socket, server._lost)
        return server

    async def _import(self, targets: Sequence[Target]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        self.socket.setblocking(False)
        received = b""
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(
                self.socket, json.dumps([astuple(target) for target in targets]).encode() + b"\n"
            )
            while not received.endswith(b"\n") and (data := await loop.sock_recv(self.socket, 1 << 16)):
                received += data
        return json.loads(received) if received.endswith(b"\n") else {}

    def _lost(self) -> None:
        """The server says nothing once it has loaded the tools: this is the end of its connection."""
        self.ended = True
        asyncio.get_running_loop().remove_reader(self.socket)

    async def how_it_ended(self) -> str:
        await self.wait(3.0)
        status = self.process.returncode
        problem = "broke its connection" if status is None else processes.describe_exit(status)
        while self.read_output():
            pass
        return problem + self.last_output()

    async def fork(self, process: ToolProcess) -> None:
        """Ask for a process; it has started, or could not be, after `process.started`."""
        ours, theirs = socket.socketpair()
        with theirs:
            await process.connect(ours)
            try:
                socket.send_fds(self.socket, [b"f"], [theirs.fileno()])
            except OSError as error:
                process.end(f"could not be started ({error})")
        self._processes = {other for other in self._processes if not other.ended} | {process}

    async def end(self) -> None:
        if not self.output.closed:
            asyncio.get_running_loop().remove_reader(self.socket)
        self.ended = True
        for process in self._processes:
            process.end("was closed")
        await super().end()


def _specs(targets: Sequence[Target]) -> str:
    return ", ".join(target.spec for target in targets)


# ---- the fork server, and a process it forked


def load_targets(targets: Sequence[tuple[str, str]]) -> list[tuple[int, HostedFactory]]:
    """Of each target (kind, spec) its factories, with the number of the target."""
    load = {"builtin": load_builtin, "tools": load_tools, "user": load_user}
    loaded: list[tuple[int, HostedFactory]] = []
    for number, (kind, spec) in enumerate(targets):
        if kind == "environment":
            loaded += [(number, factory) for factory in load_environment(spec)]
        else:
            loaded.append((number, load[kind](spec)))
    return loaded


def main(control_fd: int) -> None:
    """Serve until the trainer closes the socket."""
    processes.die_with_parent()
    control = socket.socket(fileno=control_fd)
    with control.makefile("rb") as reader:
        targets = json.loads(reader.readline())
    try:
        loaded = load_targets(targets)
        _send(control, {"loaded": [[number, asdict(factory.info)] for number, factory in loaded]})
    except VerlError as error:
        _send(control, {"error": str(error)})
        return
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        sys.stderr.write(
            f"Importing the tools started threads ({names}); forked processes do not have them. Start them in a call.\n"
        )
    factories = [factory for _, factory in loaded]
    importlib.import_module("jsonschema")  # or every process would, in its first call
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
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
                    _supervise(channel, factories, server)
            except OSError as error:
                _say_end(channel, f"could not be started ({error})")


def _supervise(channel: socket.socket, factories: Sequence[HostedFactory], server: int) -> None:
    """In a forked process: fork once more, and end together with the second process."""
    try:
        status = processes.supervise(lambda: _run(channel, factories), server, channel.fileno())
        how = processes.describe_exit(os.waitstatus_to_exitcode(status))
    except OSError as error:
        how = f"could not be started ({error})"
    _say_end(channel, how)
    os._exit(0)


def _run(channel: socket.socket, factories: Sequence[HostedFactory]) -> None:
    code = 1
    try:
        os.setsid()  # signals to the group of a tool do not reach the supervisor
        processes.die_with_parent()
        processes.prefer_as_oom_victim()
        with asyncio.Runner() as runner:
            _serve(channel, factories, runner)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the trainer has closed it
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}{error_line(error)}\n")
    finally:
        _flush()
        os._exit(code & 0xFF)


def _serve(channel: socket.socket, factories: Sequence[HostedFactory], runner: asyncio.Runner) -> None:
    """Answer requests until one says to close. The event loop also runs between them."""
    pid = os.getpid()
    reader, writer = runner.run(asyncio.open_unix_connection(sock=channel))
    writer.write(_line({"started": pid}))
    hosted: dict[int, Hosted] = {}
    while True:
        number, method, arguments, seed = pickle.loads(runner.run(_read(reader)))
        if method == "close":
            if number in hosted:
                _finish(hosted[number].close(), runner)
            return
        if seed is not None:
            _seed(seed)
        try:
            if number not in hosted:
                hosted[number] = factories[number].create()
            answer = _line({"result": _cut(_finish(getattr(hosted[number], method)(*arguments), runner))})
        except (Exception, asyncio.CancelledError) as error:  # sys.exit ends the process
            kind = error.kind if isinstance(error, ToolFailed) else ""
            answer = _line({"error": _describe(error), "kind": kind, "where": error_line(error)})
        if os.getpid() != pid:
            os._exit(0)  # a child that the call forked and that returned: the parent answers
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm the call left must not hit the next one
        _flush()
        writer.write(answer)
        runner.run(writer.drain())


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


def _finish(coroutine: Coroutine[Any, Any, Any], runner: asyncio.Runner) -> Any:
    """The result. What comes before the first await, a plain function above all, runs outside the event loop and so may
    run one of its own (`asyncio.run`)."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value

    @types.coroutine
    def rest() -> Generator[Any, Any, Any]:
        return (yield from coroutine)

    async def run() -> Any:
        return await rest()

    return runner.run(run())


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)


def _describe(error: BaseException) -> str:
    try:
        text = error.text if isinstance(error, ToolFailed) else f"{type(error).__name__}: {error}"
    except Exception:  # a user's __str__ may raise anything
        text = type(error).__name__
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " ..."


def _cut(value: Any) -> Any:
    if isinstance(value, tuple):  # of a call, with its reward
        return [_cut(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_RESULT:
        half = MAX_RESULT // 2
        return f"{value[:half]}\n[{len(value) - MAX_RESULT} characters left out]\n{value[-half:]}"
    return value


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(_line(message))


def _say_end(channel: socket.socket, how: str) -> None:
    with contextlib.suppress(OSError):  # the trainer may have closed it
        channel.settimeout(1.0)
        _send(channel, {"end": how})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have replaced or closed it
            stream.flush()
