"""Tools, environments and users written in Python, in processes that can be killed.

A call that misses its deadline, crashes, exits or floods its output costs only itself, or the one environment it
belongs to: the process is killed with whatever it started, and the call is answered with a text for the model. The
processes are forked from one that has imported what the user wrote. All coroutines belong to one event loop, whose
thread must live on until `close`: the kernel ends the processes with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args
from weakref import WeakValueDictionary

from verl.agents import tool_service
from verl.agents.base import FailureKind, Message, ToolCall, ToolFailed, ToolsLost, TryAgain
from verl.agents.hosted import Called, HostedInfo, as_reward
from verl.agents.remote import Contact, Outage
from verl.agents.tool_service import MAX_RESULT, Target
from verl.errors import RESUME, ConfigError
from verl.user_process import Connection, PythonProcess

MAX_WORKERS = 256
"""Processes that run plain functions, at most; a call waits for one."""
MAX_CONVERSATIONS = 256
"""Conversations that have processes of their own, at most; the next one waits for the end of another."""
_CLOSE_S = 5.0
_MAX_RESTARTS = 3
_FORKS_AHEAD = 16  # the socket's buffer has room for so many
_SHOWN_FAILURES = 20

_log = logging.getLogger(__name__)
_output_log = logging.getLogger("verl.agents.output")


class ToolProcess(Connection):
    """A forked process."""

    max_line = 16 * MAX_RESULT  # every character escaped
    pid = 0

    async def started(self) -> None:
        self.pid = (await self._answer).get("started", 0)


class ForkServer(PythonProcess):
    """The process that imports the targets and forks the others."""

    def __init__(self) -> None:
        super().__init__(_output_log)
        self.loaded: list[tuple[int, dict[str, Any]]] = []
        self._processes: set[ToolProcess] = set()

    @classmethod
    async def start(cls, targets: Sequence[Target]) -> ForkServer:
        server = cls()
        try:
            loaded = await server.load(
                f"{tool_service.__name__}:serve_targets", targets, ConfigError, forks=True
            )
            if loaded is None:
                specs = ", ".join(target.spec for target in targets)
                raise ConfigError(f"Importing {specs} {await server.how_it_ended()}.")
        except BaseException:
            await server.kill()
            raise
        server.loaded = loaded
        return server

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

    async def kill(self) -> None:
        for process in self._processes:
            process.end("was closed")
        await super().kill()


class ToolProcesses:
    """Runs what `targets` name. Numbers of targets are places in the list that `open` returns."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = list(targets)
        self.targets: list[Target] = []
        """Where each entry of `infos` comes from: a file may have several environments."""
        self.infos: list[HostedInfo] = []
        self.restarts = 0
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._forking = asyncio.Semaphore(_FORKS_AHEAD)
        self._workers: set[ToolProcess] = set()
        self._idle: asyncio.LifoQueue[ToolProcess | Exception] = asyncio.LifoQueue()
        """An exception: why there is no further process, for the call that gets it."""
        self._waiting = 0
        self._adding: asyncio.Task[None] | None = None
        self._free = asyncio.Semaphore(MAX_CONVERSATIONS)
        self._seats: WeakValueDictionary[str, _Seat] = WeakValueDictionary()
        self._contacts: dict[int, Contact] = {}
        self._shown = 0
        self._closing = False

    async def open(self) -> list[HostedInfo]:
        """Import every target, in the fork server. ConfigError is the user's mistake, as found there."""
        self._server = await ForkServer.start(self._targets)
        self.targets = [self._targets[number] for number, _ in self._server.loaded]
        self.infos = [
            HostedInfo(**{**fields, "hooks": tuple(fields["hooks"]), "columns": tuple(fields["columns"])})
            for _, fields in self._server.loaded
        ]
        return self.infos

    async def call(self, target: int, call: ToolCall, timeout_s: float) -> str:
        """The result of a plain function, from any idle process; waiting for one does not count as time of the call.
        ToolFailed: for the model to read."""
        process = await self._idle_worker()
        try:
            request = (target, "call", (call.name, call.arguments), None)
            return _called(await self._ask(process, call.name, request, timeout_s))[0]
        finally:
            if process.ended:
                self._workers.discard(process)
                self._add_workers()
            else:
                self._idle.put_nowait(process)

    def instance(self, target: int, conversation: str = "", seed_key: str | None = None) -> Instance:
        """What one conversation gets for its own: a process, started at the first call. Instances of one `conversation`
        share one of the `MAX_CONVERSATIONS` places, so that they never wait for each other; `random` is seeded with it,
        or with `seed_key`."""
        seat = _Seat(self._free)
        seat = self._seats.setdefault(conversation, seat) if conversation else seat
        return Instance(self, target, seed_key or conversation, seat, self.infos[target].replaceable)

    def contact(self, target: int) -> Contact:
        """The server of an environment that has one."""
        new = Contact("The server of the environment", self.infos[target].server, "multi_turn.environment")
        return self._contacts.setdefault(target, new)

    async def close(self) -> None:
        """End all processes; calls that run or wait fail. Safe to call twice."""
        self._closing = True
        if self._server is not None:
            await self._server.kill()

    # ---- processes

    async def _idle_worker(self) -> ToolProcess:
        self._waiting += 1
        try:
            self._add_workers()
            while True:
                process = await self._idle.get()
                if isinstance(process, Exception):
                    raise process
                if not process.ended or not process.answers:
                    return process
                self._workers.discard(process)  # it ended between calls, because of an earlier one
                self._add_workers()
        finally:
            self._waiting -= 1

    def _add_workers(self) -> None:
        """One after the other, so that a burst of quick calls is served by few processes."""
        idle = self._adding is None or self._adding.done()
        if idle and self._waiting > self._idle.qsize() and len(self._workers) < MAX_WORKERS:
            self._adding = asyncio.create_task(self._add_worker())
            self._adding.add_done_callback(lambda _: self._add_workers())

    async def _add_worker(self) -> None:
        process = ToolProcess()
        self._workers.add(process)
        try:
            await self._fork(process)
            self._idle.put_nowait(process)
        except Exception as error:
            self._workers.discard(process)
            self._idle.put_nowait(error)

    async def _fork(self, process: ToolProcess) -> None:
        """Start a process. One that could not be forked has ended, which its first request says."""
        try:
            async with self._forking:
                async with self._starting:
                    if self._server is None or self._closing:
                        raise ToolFailed("The tools are closed.")
                    if self._server.ended:
                        await self._restart(self._server)
                    await self._server.fork(process)
                await process.started()
        except BaseException:
            process.end("was not started")
            raise

    async def _restart(self, lost: ForkServer) -> None:
        problem = await lost.how_it_ended()
        if self.restarts == _MAX_RESTARTS:
            raise ToolsLost(
                f"The process that starts the tools {problem}, for the {_MAX_RESTARTS + 1}th time. Too much memory, "
                f"or a tool that kills other processes, may be the cause; {RESUME}."
            )
        self.restarts += 1
        _log.warning("the process that starts the tools %s; it is started again", problem)
        await lost.kill()
        try:
            self._server = await ForkServer.start(self._targets)
        except ConfigError as error:
            raise ToolsLost(f"The tools cannot be imported any more: {error}") from error

    async def _ask(self, process: ToolProcess, name: str, request: tuple[Any, ...], timeout_s: float) -> Any:
        """The result of one request; `name` is what the failure is said of."""
        try:
            payload = pickle.dumps(request)
        except Exception as error:  # pickling calls whatever __reduce__ the data has
            raise ToolFailed(f"{name} failed: its arguments cannot be sent ({error})") from error
        answer = await process.request(payload, timeout_s)
        if answer is None:
            self._show(f"{name} {process.ended} (multi_turn.tool_timeout_s)")
            raise ToolFailed(f"{name} {process.ended}.", "timeout")
        if "result" in answer:
            return answer["result"]
        if process.ended:
            self._show(f"{name} {process.ended}")
            raise ToolFailed(f"{name} {process.ended}.")
        text = str(answer.get("error"))
        if answer.get("full") is not None:
            raise TryAgain(text, answer["full"])
        self._show(f"{name} failed: {text}{answer.get('where', '')}")
        if answer.get("kind") in get_args(FailureKind):  # the text was written for the model
            raise ToolFailed(text, answer["kind"])
        raise ToolFailed(f"{name} failed: {text}")

    def _show(self, text: str) -> None:
        """The first failures are shown, all are counted in metrics."""
        self._shown += 1
        _log.log(logging.WARNING if self._shown <= _SHOWN_FAILURES else logging.DEBUG, "%s", text)
        if self._shown == _SHOWN_FAILURES:
            _log.warning("(further failures of tools are logged at level DEBUG)")


@dataclass(eq=False)
class _Seat:
    """A conversation's place among `MAX_CONVERSATIONS`, shared by its instances."""

    free: asyncio.Semaphore
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    holders: int = 0

    async def take(self) -> None:
        async with self.lock:
            if not self.holders:
                await self.free.acquire()
            self.holders += 1

    def leave(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.free.release()


class Instance:
    """An environment, a user or tools of one conversation. Requests run one after the other. When its process has
    ended, all raise ToolFailed, unless it is `replaceable`: then the next one gets a new process."""

    def __init__(
        self, owner: ToolProcesses, target: int, seed_key: str, seat: _Seat, replaceable: bool = False
    ) -> None:
        self._owner = owner
        self._target = target
        self._seat = seat
        digest = hashlib.sha256(seed_key.encode()).digest()[:8]
        self._seed = int.from_bytes(digest, "big") if seed_key else None
        self._replaceable = replaceable
        self._row: dict[str, Any] | None = None
        self._process: ToolProcess | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def reset(self, row: dict[str, Any], timeout_s: float) -> str | None:
        """ToolsLost: the server of the environment answers nobody."""
        self._row = row
        contact = self._owner.contact(self._target)
        outage = Outage(contact)
        while True:
            try:
                opening = _text_or_none(await self._request("reset", (row,), timeout_s))
                contact.heard = time.monotonic()
                return opening
            except TryAgain as refused:
                if refused.full:
                    contact.heard = time.monotonic()
                await outage.pause(refused.text)

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        return await self._request("run", (row, base_url, api_key), math.inf, "the agent")

    async def call(self, call: ToolCall, timeout_s: float) -> Called:
        return _called(await self._request("call", (call.name, call.arguments), timeout_s, call.name))

    async def user(self, reply: str, messages: list[Message], timeout_s: float) -> str | None:
        return _text_or_none(await self._request("user", (reply, messages), timeout_s))

    async def turn_reward(self, timeout_s: float) -> float | None:
        return _number_or_none(await self._request("turn_reward", (), timeout_s))

    async def reward(self, timeout_s: float) -> float | None:
        return _number_or_none(await self._request("reward", (), timeout_s))

    async def close(self) -> None:
        """Let it free what it holds, for some seconds, then end its process. Safe to call twice."""
        async with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._process is None:
                return
            try:  # it ends itself; there is no answer
                await self._process.request(pickle.dumps((self._target, "close", (), None)), _CLOSE_S)
            finally:
                self._process.end("was closed")
                self._seat.leave()

    async def _request(
        self, method: str, arguments: tuple[Any, ...], timeout_s: float, name: str = ""
    ) -> Any:
        async with self._lock:
            if self._closed:
                raise ToolFailed("The environment has ended: it was closed.")
            seed, before = None, self._process
            if before is None:
                await self._seat.take()
            elif before.ended and not self._replaceable:
                raise ToolFailed(f"The environment has ended: it {before.ended}.")
            if before is None or before.ended:
                self._process = process = ToolProcess()
                seed = self._seed
                await self._owner._fork(process)
                if before is not None and self._row is not None:
                    again = (self._target, "reset", (self._row,), seed)
                    await self._owner._ask(process, "reset", again, timeout_s)
                    seed = None
            else:
                process = before
            request = (self._target, method, arguments, seed)
            return await self._owner._ask(process, name or method, request, timeout_s)


def _called(answer: Any) -> Called:
    """JSON has no tuples."""
    if isinstance(answer, list) and len(answer) == 2:
        return _text(answer[0]), _number_or_none(answer[1])
    return _text(answer), None


def _text(value: Any) -> str:
    """What a tokenizer can read: no half of a surrogate pair."""
    return str(value).encode("utf-8", "replace").decode()


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _number_or_none(value: Any) -> float | None:
    try:
        return as_reward(value, "a tool's process")
    except (TypeError, ValueError) as error:
        raise ToolFailed(str(error)) from None
