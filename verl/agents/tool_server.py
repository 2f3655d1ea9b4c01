"""Tools behind an HTTP address: our protocol (GET /tools, POST /call), verl-tool's (POST /get_observation) or MCP."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import httpx

from verl.agents.base import FailureKind, Observation, Schema, ToolCall, ToolFailed, ToolProvider, ToolsLost
from verl.agents.mcp import MCPTools
from verl.agents.remote import CONCURRENCY, RemoteServer, ServerAnswer, plain_text
from verl.agents.schemas import read_schema
from verl.errors import ConfigError, MissingPackage

KEY = "rollout.multi_turn.tool_server"
_ABSENT = (404, 405, 501)

_log = logging.getLogger(__name__)


async def connect_tool_server(
    address: str, timeout_s: float, concurrency: int = CONCURRENCY
) -> ToolProvider | TextServer:
    """Find out which protocol the server at `address` speaks and connect. A server that is still starting is waited
    for; `timeout_s` bounds each answer."""
    base, given_mcp = _base(address)
    server = RemoteServer(base, "The tool server", key=KEY, concurrency=concurrency)
    tried: list[str] = []
    try:
        if not given_mcp:
            if (schemas := await _probe_tools(server, timeout_s, tried)) is not None:
                _log.info(
                    "tool server %s speaks verl's protocol (/tools, /call): %d tools", base, len(schemas)
                )
                return ServerTools(server, schemas)
            if await _probe_text(server, timeout_s, tried):
                _log.info("tool server %s speaks verl-tool's protocol (/get_observation)", base)
                return TextServer(server)
        tools = await _probe_mcp(base, concurrency, tried)
        if tools is not None:
            _log.info("tool server %s speaks MCP (/mcp): %d tools", base, len(tools.schemas))
            await server.close()
            return tools
    except ToolsLost as error:
        await server.close()
        raise ConfigError(f"{KEY}={address}: {error}") from error
    except BaseException:
        await server.close()
        raise
    await server.close()
    raise ConfigError(
        f"{KEY}={address}: a server is there, but it speaks none of the known protocols. " + "; ".join(tried)
    )


class ServerTools(ToolProvider):
    """A server that lists OpenAI schemas at GET /tools and runs a call at POST /call."""

    def __init__(self, server: RemoteServer, schemas: Sequence[Schema]) -> None:
        self._server, self._schemas = server, schemas

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._schemas

    async def call(self, key: str, call: ToolCall, timeout_s: float) -> str:
        body = {"name": call.name, "arguments": call.arguments, "session": key}
        answer = await self._server.request("POST", "/call", body, timeout_s=timeout_s)
        content = _object(answer)
        if isinstance(content.get("error"), str):
            kind: Any = content.get("kind")
            raise ToolFailed(
                plain_text(content["error"]), kind if kind in get_args(FailureKind) else "failed"
            )
        if answer.status != 200 or "result" not in content:
            raise _unusable(answer, "a JSON object with 'result' or 'error'")
        return plain_text(content["result"])

    async def close(self) -> None:
        await self._server.close()


class TextServer:
    """A server that reads whole turns of the model and answers with observations (verl-tool)."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server

    async def observe(
        self, key: str, text: str, extra_fields: Mapping[str, Any], last: bool, timeout_s: float
    ) -> Observation:
        """What the server says to a turn. ToolFailed: for the model to read; ToolsLost: the run must stop."""
        answer = await self._post(key, text, extra_fields, timeout_s, is_last_step=[last])
        content = _object(answer)
        try:
            (observation,), (done,), (valid,) = (content[key] for key in ("observations", "dones", "valids"))
        except (KeyError, TypeError, ValueError):
            raise _unusable(answer, "observations, dones and valids, one each") from None
        if isinstance(observation, dict) and "obs" in observation:
            observation = observation["obs"] or next(
                (str(observation[key]) for key in ("invalid_reason", "error") if observation.get(key)), ""
            )
        return Observation(plain_text(observation), bool(done), bool(valid))

    async def end(self, key: str, timeout_s: float = 30.0) -> None:
        """The conversation is over: the server frees what it keeps. A failure is logged, no more: no text of the
        conversation depends on it."""
        try:
            await self._post(key, "", {}, timeout_s, finish=[True])
        except (ToolFailed, ToolsLost) as error:
            _log.warning("%s: ending %s failed: %s", self._server.contact.address, key, error)

    async def close(self) -> None:
        await self._server.close()

    async def _post(
        self,
        key: str,
        text: str,
        extra_fields: Mapping[str, Any],
        timeout_s: float,
        **lists: list[bool],
    ) -> ServerAnswer:
        body = {
            "trajectory_ids": [key],
            "actions": [text],
            "extra_fields": [dict(extra_fields)],
            **lists,
        }
        return await self._server.request("POST", "/get_observation", body, timeout_s=timeout_s)


def read_schemas(listed: Any, source: str) -> list[Schema]:
    """OpenAI function schemas as a server listed them; ConfigError for anything else."""
    if not isinstance(listed, list):
        raise ConfigError(f"{source} gave no list of tools: {str(listed)[:200]}")
    names: set[str] = set()
    for schema in listed:
        function = schema.get("function") if isinstance(schema, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f'{source} lists {str(schema)[:200]}, which is no {{"type": "function", "function": {{"name": ...}}}}'
            )
        if name in names:
            raise ConfigError(f"{source} lists two tools called {name!r}")
        names.add(name)
    if not names:
        raise ConfigError(f"{source} has no tools")
    return [read_schema(schema, source) for schema in listed]


# ---- probing


def _base(address: str) -> tuple[str, bool]:
    """The address without a protocol's own path, and whether that path was MCP's."""
    full = address.strip() if "://" in address else f"http://{address.strip()}"
    try:
        url = httpx.URL(full)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or re.search(r"\s", full):
        raise ConfigError(f"{KEY}={address!r} is no HTTP address such as http://127.0.0.1:5000")
    base = re.sub(r"/(get_observation|tools|call|mcp)$", "", full.rstrip("/"))
    return base, full.rstrip("/").endswith("/mcp")


async def _probe_tools(server: RemoteServer, timeout_s: float, tried: list[str]) -> list[Schema] | None:
    answer = await _ask(server, "GET", "/tools", None, timeout_s, tried)
    try:
        content = answer.json() if answer is not None and answer.status == 200 else None
    except ValueError:
        content = None
    if not isinstance(content, dict) or "tools" not in content:
        return None
    return read_schemas(content["tools"], f"{KEY}={server.contact.address}/tools")


async def _probe_text(server: RemoteServer, timeout_s: float, tried: list[str]) -> bool:
    health = await _ask(server, "GET", "/health", None, timeout_s, tried)
    if health is None or health.status != 200:
        return False
    # Empty lists ask for nothing: a server answers them with empty lists, or that there must be one trajectory.
    empty: dict[str, list[Any]] = {"trajectory_ids": [], "actions": [], "extra_fields": []}
    answer = await _ask(server, "POST", "/get_observation", empty, timeout_s, tried)
    return answer is not None and answer.status not in _ABSENT


async def _ask(
    server: RemoteServer, method: str, path: str, body: Any, timeout_s: float, tried: list[str]
) -> ServerAnswer | None:
    try:
        answer = await server.request(method, path, body, timeout_s=timeout_s)
    except ToolFailed as error:
        tried.append(f"{method} {path}: {error.text}")
        return None
    tried.append(f"{method} {path}: {answer}")
    return answer


async def _probe_mcp(base: str, concurrency: int, tried: list[str]) -> MCPTools | None:
    tools = MCPTools(f"{base}/mcp", KEY, concurrency)
    try:
        await tools.open()
    except (ConfigError, MissingPackage) as error:
        tried.append(f"MCP at /mcp: {error}")
        return None
    except BaseException:
        await tools.close()
        raise
    return tools


# ---- answers


def _object(answer: ServerAnswer) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise _unusable(answer, "a JSON object")
    return content


def _unusable(answer: ServerAnswer, wanted: str) -> ToolFailed:
    _log.warning("a tool server answered with %s; it should be %s", answer, wanted)
    return ToolFailed(f"The answer of the tool server (HTTP {answer.status}) is not {wanted}.")
