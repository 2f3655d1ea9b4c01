"""Tools of an MCP server: a process of ours that speaks over its standard input and output, or an HTTP address.

A connection lives in one task, as the `mcp` package requires; when it breaks or hangs, the next call makes a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TextIO

from verl.agents import remote
from verl.agents.base import Schema, ToolCall, ToolFailed, ToolProvider, ToolsLost
from verl.agents.remote import (
    CONCURRENCY,
    MAX_SENDS,
    Contact,
    Outage,
    describe,
    plain_text,
)
from verl.agents.schemas import read_schema
from verl.errors import ConfigError, missing_package
from verl.json_input import IDENTITY, is_encoded
from verl.processes import supervised_command

HANDSHAKE_S = 120.0
"""For a command, which may download its program first; an address has `remote.LOST_AFTER_S`."""
CHECK_S = 10.0
"""A server that answers nothing for so long after a call timed out is taken to hang."""
_CLOSE_S = 10.0
_MAX_CONCURRENT = 64
_KEPT_STDERR = 2000
_MAX_PAGES = 100


class MCPTools(ToolProvider):
    """The tools of one server. `target` is an http(s) address, or a command line."""

    def __init__(
        self, target: str, key: str = "rollout.multi_turn.mcp", concurrency: int = CONCURRENCY
    ) -> None:
        self.target, self._key = target.strip(), key
        self._contact = Contact("The MCP server", self.target, key)
        self._schemas: list[Schema] = []
        self._connection: _Connection | None = None
        self._replaced: list[_Connection] = []
        """Broken connections whose server may not have ended yet."""
        self._attempt: asyncio.Task[_Connection] | None = None
        self._places = asyncio.Semaphore(min(concurrency, _MAX_CONCURRENT))

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._schemas

    async def open(self) -> None:
        _require_package()
        outage = Outage(self._contact)
        while True:
            # Only a server that is still starting is waited for. Asked before the attempt: it may start meanwhile.
            is_there = not self._is_address or await _listens(self.target)
            try:
                connection = await self._connected()
                break
            except _Broken as error:
                refused = ConfigError(f"{self._key}={self.target}: no MCP server could be reached: {error}")
                if is_there:
                    raise refused from None
                try:
                    await outage.pause(str(error))
                except ToolsLost:
                    raise refused from None
        self._contact.heard = time.monotonic()
        self._schemas = [
            read_schema(_schema(tool), f"{self._key}={self.target}") for tool in connection.tools
        ]
        if not self._schemas:
            await self.close()
            raise ConfigError(f"{self._key}={self.target}: the server has no tools")

    async def call(self, key: str, call: ToolCall, timeout_s: float) -> str:
        try:  # what the package cannot write would cost it the connection
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolFailed(f"The arguments cannot be written as JSON: {error}.", "malformed") from None
        outage, sends = Outage(self._contact), 0
        async with self._places:
            while True:
                try:
                    connection = await self._connected()
                except _Broken as error:
                    await outage.pause(str(error))
                    continue
                try:
                    return await connection.call(call, timeout_s)
                except _Broken as error:
                    sends += 1
                    if sends == MAX_SENDS:
                        text = f"The connection broke {sends} times during this call."
                        raise ToolFailed(text) from error

    async def close(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.wait({self._attempt})
        if self._connection is not None:
            self._replaced.append(self._connection)
            self._connection = None
        await asyncio.gather(*(connection.close("closed") for connection in self._replaced))
        self._replaced = []

    @property
    def _is_address(self) -> bool:
        return self.target.startswith(("http://", "https://"))

    async def _connected(self) -> _Connection:
        """The connection in use, or a new one; _Broken where none can be made. Callers share an attempt."""
        if self._connection is not None and not self._connection.is_over:
            return self._connection
        if self._attempt is None or self._attempt.done():
            self._attempt = asyncio.create_task(self._connect())
        return await asyncio.shield(self._attempt)

    async def _connect(self) -> _Connection:
        if self._connection is not None:
            self._replaced = [each for each in self._replaced if not each.ended] + [self._connection]
            self._connection = None
        if self._is_address:
            connection = _Connection(_over_http(self.target), remote.LOST_AFTER_S)
        else:
            connection = _Connection(self._over_stdio(), HANDSHAKE_S)
        await connection.open()
        self._connection = connection
        return connection

    @contextlib.asynccontextmanager
    async def _over_stdio(self) -> AsyncIterator[tuple[Any, ...]]:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        try:
            program, *arguments = shlex.split(self.target)
        except ValueError as error:
            raise ConfigError(
                f"{self._key}={self.target!r} is neither an HTTP address nor a command line: {error}"
            ) from error
        found = shutil.which(program)
        if found is None:
            raise ConfigError(f"{self._key}={self.target}: there is no program {program!r} on the PATH")
        command, *rest = supervised_command([found, *arguments])
        with _Stderr() as stderr:
            try:
                parameters = StdioServerParameters(
                    command=command, args=rest, env=dict(os.environ), encoding_error_handler="replace"
                )
                async with stdio_client(parameters, errlog=stderr.file) as streams:
                    yield streams
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) or not (said := stderr.tail()):
                    raise
                raise _Broken(f"{describe(error)}; its stderr ends with: {said}") from error


class _Broken(Exception):
    """There is no connection, or no more."""


class _Connection:
    """A session, held open by its own task until it breaks or is closed."""

    def __init__(
        self, transport: contextlib.AbstractAsyncContextManager[tuple[Any, ...]], handshake_s: float
    ) -> None:
        self.tools: list[dict[str, Any]] = []
        self._transport, self._handshake_s = transport, handshake_s
        self._session: Any = None
        self._ready, self._stop = asyncio.Event(), asyncio.Event()
        self._problem = "the connection was closed"
        self._answers = 0
        self._checking: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left."""
        return self._task is None or self._task.done()

    @property
    def is_over(self) -> bool:
        return self.ended or self._stop.is_set()

    async def open(self) -> None:
        """_Broken: no server, or not one that speaks MCP."""
        self._task = asyncio.create_task(self._hold(), name="mcp")
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait(
                {ready, self._task}, timeout=self._handshake_s, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            ready.cancel()
        if self._task.done():
            error = self._task.exception()
            if isinstance(error, ConfigError):
                raise error
            raise _Broken(self._problem)
        if not self._ready.is_set():
            await self.close("cancelled")
            raise _Broken(f"no handshake within {self._handshake_s:g} s")

    async def call(self, call: ToolCall, timeout_s: float) -> str:
        try:
            answer = await self._ask(self._session.call_tool(call.name, call.arguments), timeout_s)
        except TimeoutError:
            if self._checking is None or self._checking.done():
                self._checking = asyncio.create_task(self._close_if_hung())
            raise ToolFailed(f"There was no answer within {timeout_s:g} s.", "timeout") from None
        except _Broken:
            raise
        except Exception as error:  # of the server or of this call: the package has one type for both
            if not await self._is_alive():
                await self.close(describe(error))
                raise _Broken(self._problem) from error
            raise ToolFailed(str(error)[:1000] or type(error).__name__) from error
        try:
            return _text(answer.model_dump(by_alias=True, mode="json"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ToolFailed("The answer of the MCP server cannot be read.") from error

    async def close(self, problem: str) -> None:
        if not self._stop.is_set():
            self._problem = problem
            self._stop.set()
        if self._checking is not None and self._checking is not asyncio.current_task():
            self._checking.cancel()
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=_CLOSE_S)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_S)

    async def _hold(self) -> None:
        from mcp import ClientSession

        try:
            async with self._transport as (read, write, *_), ClientSession(read, write) as session:
                await session.initialize()
                self.tools = await _list_tools(session)
                self._session = session
                self._ready.set()
                await self._stop.wait()
        except ConfigError:
            raise
        except Exception as error:
            if not self._stop.is_set():
                self._problem = str(error) if isinstance(error, _Broken) else describe(error)

    async def _ask(self, request: Any, timeout_s: float) -> Any:
        """The result of a request, TimeoutError, or _Broken as soon as the connection is over."""
        assert self._task is not None
        task, stopped = asyncio.ensure_future(request), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait(
                {task, stopped, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                self._answers += 1
                return task.result()
            if self.is_over:
                raise _Broken(self._problem)
            raise TimeoutError
        finally:
            task.cancel()
            stopped.cancel()

    async def _is_alive(self) -> bool:
        try:
            await self._ask(self._session.send_ping(), CHECK_S)
        except Exception:
            return False
        return True

    async def _close_if_hung(self) -> None:
        """A server that is only busy answers other calls meanwhile."""
        before = self._answers
        if not await self._is_alive() and self._answers == before:
            await self.close(f"the server answered nothing within {CHECK_S:g} s")


class _Stderr:
    """A pipe for a server's standard error that keeps its end, for messages."""

    def __enter__(self) -> _Stderr:
        source, target = os.pipe()
        self.file: TextIO = os.fdopen(target, "w")
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def tail(self) -> str:
        self.file.close()
        self._thread.join(1.0)  # what the server wrote last may still be on its way
        return self._kept.decode(errors="replace").strip()

    def _read(self, source: int) -> None:
        with os.fdopen(source, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65536):
                self._kept = (self._kept + chunk)[-_KEPT_STDERR:]


def _require_package() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise missing_package("mcp", "mcp", "an MCP server") from None
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # tracebacks of what we report ourselves


def _over_http(address: str) -> contextlib.AbstractAsyncContextManager[tuple[Any, ...]]:
    from mcp.client import streamable_http as package

    streamable_http: Any = package  # its names depend on its version

    def client(headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None) -> Any:
        made = streamable_http.create_mcp_http_client({**(headers or {}), **IDENTITY}, timeout, auth)
        made.event_hooks = {"response": [_refuse_encoded]}
        return made

    connect = getattr(streamable_http, "streamable_http_client", None)
    if connect is None:  # before 1.24
        return streamable_http.streamablehttp_client(address, httpx_client_factory=client)

    @contextlib.asynccontextmanager
    async def connected() -> AsyncIterator[tuple[Any, ...]]:
        async with client() as http, connect(address, http_client=http) as streams:
            yield streams

    return connected()


async def _refuse_encoded(response: Any) -> None:
    if is_encoded(response.headers):
        raise ConnectionError("its answer is compressed, which was not asked for")


async def _listens(address: str) -> bool:
    from httpx import URL

    url = URL(address)
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        async with asyncio.timeout(CHECK_S):
            _, writer = await asyncio.open_connection(url.host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _list_tools(session: Any) -> list[dict[str, Any]]:
    from mcp.types import PaginatedRequestParams

    tools: list[dict[str, Any]] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        listed = page.model_dump(by_alias=True, mode="json")
        tools += listed["tools"]
        cursor = listed.get("nextCursor")
        if not cursor:
            break
    return tools


def _schema(tool: dict[str, Any]) -> Schema:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _text(answer: dict[str, Any]) -> str:
    """The text blocks of a result; other kinds by name; structured content where there is nothing else."""
    blocks = [
        block["text"] if block.get("type") == "text" else f"[{block.get('type')}]"
        for block in answer.get("content") or ()
    ]
    text = "\n".join(blocks)
    if not blocks and answer.get("structuredContent") is not None:
        text = plain_text(answer["structuredContent"])
    if answer.get("isError"):
        raise ToolFailed(text[:1000] or "The tool failed without a message.")
    return text
