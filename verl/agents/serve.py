"""`verl tool-server`: tools over HTTP, for runs that set `rollout.multi_turn.tool_server` to its address.

GET /tools -> {"tools": [OpenAI schemas]}; GET /health -> {"status": "ok"}; POST /call {"name", "arguments", "session"}
-> {"result"}, or {"error", "kind"} (kind as in `FailureKind`, may be missing).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl import http_server
from verl.agents.base import Schema, ToolCall, ToolFailed
from verl.agents.builtin_tools import BuiltinTools, python_within
from verl.agents.tool_processes import Target, ToolProcesses
from verl.config.sections.reward import SandboxConfig
from verl.errors import ConfigError, RewardError
from verl.json_input import parse_json
from verl.processes import usable_cores

_MAX_BODY = 4 << 20
_SANDBOX_S = 60.0
"""For starting the sandbox of the tool 'python', and for ending it."""

_log = logging.getLogger(__name__)

Tools = dict[str, tuple[Schema, Callable[[ToolCall], str]]]
"""Name -> schema, and what runs a call; ToolFailed is for the model to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=5000, help="port; 0: any free one")
    parser.add_argument(
        "--tools",
        nargs="+",
        default=[],
        metavar="FILE",
        help="your functions, as for rollout.multi_turn.tools",
    )
    parser.add_argument("--documents", type=Path, metavar="FOLDER", help="text files for the tool 'search'")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="limit of one call")
    parser.add_argument(
        "--allow-unisolated",
        action="store_true",
        help="run Python without a sandbox; only on expendable machines",
    )


def run(args: argparse.Namespace) -> int:
    if not args.timeout > 0:
        raise ConfigError(f"--timeout {args.timeout:g} must be above 0")
    builtin = BuiltinTools(_python_limits(args), args.documents)
    with (
        served_tools(builtin, args.tools, args.timeout) as tools,
        ToolServer(args.host, args.port, tools) as server,
    ):
        _log.info("tools %s at %s", ", ".join(server.tools), server.url)
        if not server.loopback:
            _log.warning("whoever reaches this address can call these tools: there is no password")
        server.serve_forever()
    return 0


def _python_limits(args: argparse.Namespace) -> SandboxConfig | None:
    """Of the tool 'python'; None where programs cannot be isolated."""
    limits = SandboxConfig(timeout_s=args.timeout, allow_unisolated=args.allow_unisolated)
    try:
        python_within(limits)
    except RewardError as error:
        _log.warning(
            "the tool 'python' is left out (--allow-unisolated runs it without isolation). %s", error
        )
        return None
    return limits


@contextlib.contextmanager
def served_tools(builtin: BuiltinTools, specs: Sequence[str], timeout_s: float) -> Iterator[Tools]:
    """The built-in tools and the functions of `specs`, in processes that are killed when a call exceeds its time."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()

    def result_of(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    processes = ToolProcesses(
        [Target("builtin", "built-in tools", builtin), *(Target("tools", spec) for spec in specs)]
    )
    places = asyncio.Semaphore(4 * usable_cores())  # programs at a time that the cores can bear

    async def call_tool(target: int, call: ToolCall) -> str:
        if target:
            return await processes.call(target, call, timeout_s)
        # The sandbox ends a program after `timeout_s`, and says what it has printed until then.
        async with places:
            return await processes.call(0, call, timeout_s + (_SANDBOX_S if call.name == "python" else 0.0))

    def call_now(target: int, call: ToolCall) -> str:
        return str(result_of(call_tool(target, call)))

    try:
        tools: Tools = {}
        users: set[str] = set()
        for target, info in enumerate(result_of(processes.open())):
            if info.stateful:
                raise ConfigError(
                    f"--tools {info.name}: its tools keep a state per conversation; give functions"
                )
            for schema in info.schemas:
                name = schema["function"]["name"]
                if name in users:
                    raise ConfigError(f"--tools {info.name}: a tool {name!r} is there already; rename one")
                if name in tools:
                    _log.info("--tools replaces the tool %r", name)
                if target:
                    users.add(name)
                tools[name] = (schema, functools.partial(call_now, target))
        yield tools
    finally:
        result_of(processes.close())
        loop.call_soon_threadsafe(loop.stop)


class ToolServer(http_server.Server):
    max_connections = 1024
    keep_answering = True

    def __init__(self, host: str, port: int, tools: Tools) -> None:
        self.tools: Mapping[str, tuple[Schema, Callable[[ToolCall], str]]] = tools
        try:
            super().__init__(host, port, _Handler)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "something else listens there; choose another --port" if taken else str(error)
            raise ConfigError(f"--host {host} --port {port}: cannot listen: {why}") from error

    def call(self, name: Any, arguments: Any) -> str:
        """The result; ToolFailed is for the model to read."""
        if not isinstance(name, str) or name not in self.tools:
            raise ToolFailed(f"There is no tool {name!r}. Tools: {', '.join(self.tools)}.", "unknown")
        if not isinstance(arguments, dict):
            raise ToolFailed(
                f"The arguments of {name} must be an object, not {arguments!r:.100}.", "malformed"
            )
        return self.tools[name][1](ToolCall(name, arguments))


class _Handler(http_server.Handler):
    server: ToolServer
    protocol_version = "HTTP/1.1"
    idle_s = 300.0
    error_content_type = "application/json"
    error_message_format = '{"error": "%(explain)s"}'

    def do_GET(self) -> None:
        if self._is_refused():
            return
        if self.path == "/tools":
            self._answer(200, {"tools": [schema for schema, _ in self.server.tools.values()]})
        elif self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(404, {"error": f"there is no {self.path}; GET /tools, GET /health, POST /call"})

    def do_POST(self) -> None:
        try:
            body = self._body()
        except ValueError as error:
            self.close_connection = True  # what follows on this connection may be the rest of the body
            self._answer(400, {"error": str(error)})
            return
        self.request_complete()
        if self._is_refused():
            return
        if self.path != "/call":
            self._answer(404, {"error": f"there is no {self.path}; GET /tools, GET /health, POST /call"})
            return
        try:
            answer = {"result": self.server.call(body.get("name"), body.get("arguments", {}))}
        except ToolFailed as error:
            answer = {"error": error.text, "kind": error.kind}
        except Exception as error:
            _log.exception("a call of %r failed", body.get("name"))
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        self._answer(200, answer)

    def _is_refused(self) -> bool:
        """Whether it was refused because a web page of another site may be asking."""
        refused = http_server.is_from_elsewhere(self.headers, self.server.loopback)
        if refused:
            here = "127.0.0.1 or localhost" if self.server.loopback else "this address"
            self._answer(403, {"error": f"Host must name {here}, and Origin, if there is one, the same"})
        return refused

    def _body(self) -> dict[str, Any]:
        # Web pages cannot send this type to another address unasked.
        if self.headers.get_content_type() != "application/json":
            raise ValueError("Content-Type must be application/json")
        length = int(self.headers.get("Content-Length") or -1)
        if not 0 <= length <= _MAX_BODY:
            raise ValueError(f"Content-Length must be between 0 and {_MAX_BODY}")
        body = parse_json(self.rfile.read(length))
        if not isinstance(body, dict):
            raise ValueError('the body must be a JSON object: {"name", "arguments", "session"}')
        return body

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
