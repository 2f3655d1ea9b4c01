"""`verl tool-server`: tools over HTTP, for runs that set `rollout.multi_turn.tool_server` to its address.

GET /tools -> {"tools": [OpenAI schemas]}; GET /health -> {"status": "ok"}; POST /call {"name", "arguments", "session"}
-> {"result"}, or {"error", "kind"} (kind as in `FailureKind`, may be missing).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from verl.agents import builtin_tools
from verl.agents.base import Schema, ToolCall, ToolFailed
from verl.agents.hosted import HostedFunctions
from verl.agents.schemas import ToolFunction
from verl.agents.tool_host import Target
from verl.agents.tool_processes import ToolProcesses
from verl.config.sections.reward import SandboxConfig
from verl.errors import ConfigError, RewardError
from verl.json_input import parse_json
from verl.processes import usable_cores

_MAX_BODY = 4 << 20
_IDLE_S = 300.0

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
    functions = [builtin_tools.calculator]
    try:
        limits = SandboxConfig(timeout_s=args.timeout, allow_unisolated=args.allow_unisolated)
        functions.append(builtin_tools.python_within(limits))
    except RewardError as error:
        _log.warning(
            "the tool 'python' is left out (--allow-unisolated runs it without isolation). %s", error
        )
    if args.documents is not None:
        functions.append(builtin_tools.search_in(args.documents))
    tools = own_tools(functions)
    with user_tools(args.tools, args.timeout) as further:
        for name in further:
            if name in tools:
                _log.info("--tools replaces the tool %r", name)
        with ToolServer(args.host, args.port, tools | further) as server:
            _log.info("tools %s at %s", ", ".join(server.tools), server.address)
            if not ipaddress.ip_address(str(server.server_address[0])).is_loopback:
                _log.warning("whoever reaches this address can call these tools: there is no password")
            server.serve_forever()
    return 0


def own_tools(functions: Sequence[Callable[..., str]]) -> Tools:
    """Functions that limit themselves, run where they are called: no more at a time than the cores can bear."""
    described = [(ToolFunction.of(function), function) for function in functions]
    hosted, places = HostedFunctions(described), threading.BoundedSemaphore(4 * usable_cores())

    def call(call: ToolCall) -> str:
        with places:
            return asyncio.run(hosted.call(call.name, call.arguments))

    return {tool.name: (tool.schema, call) for tool, _ in described}


@contextlib.contextmanager
def user_tools(specs: Sequence[str], timeout_s: float) -> Iterator[Tools]:
    """Functions of others, in processes that are killed when a call exceeds its time."""
    if not specs:
        yield {}
        return
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()

    def result_of(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def calls_of(target: int) -> Callable[[ToolCall], str]:
        return lambda call: result_of(processes.call(target, call, timeout_s))

    processes = ToolProcesses([Target("tools", spec) for spec in specs])
    try:
        tools: Tools = {}
        for target, info in enumerate(result_of(processes.open())):
            if info.stateful:
                raise ConfigError(
                    f"--tools {info.name}: its tools keep a state per conversation; give functions"
                )
            for schema in info.schemas:
                name = schema["function"]["name"]
                if name in tools:
                    raise ConfigError(f"--tools {info.name}: a tool {name!r} is there already; rename one")
                tools[name] = (schema, calls_of(target))
        yield tools
    finally:
        result_of(processes.close())
        loop.call_soon_threadsafe(loop.stop)


class ToolServer(ThreadingHTTPServer):
    """Answers each connection in its own thread."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, tools: Tools) -> None:
        self.tools: Mapping[str, tuple[Schema, Callable[[ToolCall], str]]] = tools
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "something else listens there; choose another --port" if taken else str(error)
            raise ConfigError(f"--host {host} --port {port}: cannot listen: {why}") from error

    @property
    def address(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"

    def call(self, name: Any, arguments: Any) -> str:
        """The result; ToolFailed is for the model to read."""
        if not isinstance(name, str) or name not in self.tools:
            raise ToolFailed(f"There is no tool {name!r}. Tools: {', '.join(self.tools)}.", "unknown")
        if not isinstance(arguments, dict):
            raise ToolFailed(
                f"The arguments of {name} must be an object, not {arguments!r:.100}.", "malformed"
            )
        return self.tools[name][1](ToolCall(name, arguments))


class _Handler(BaseHTTPRequestHandler):
    server: ToolServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    timeout = _IDLE_S

    def do_GET(self) -> None:
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

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
