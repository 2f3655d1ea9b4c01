"""`openenv:URL`: environments behind a server of OpenEnv, each conversation in a WebSocket session of its own.

A turn of the model is one action: the text, or the number, of its only field, else a JSON object of its fields. The
model reads the only field of an observation, else all of them as JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from verl.agents.base import Message, ToolFailed, TryAgain, without_thoughts
from verl.agents.hosted import Hosted, HostedFactory, HostedInfo, as_reward, as_text
from verl.agents.hubs import environment_kwargs, group_seed, last_integer
from verl.agents.remote import MAX_ANSWER_BYTES
from verl.errors import ConfigError, missing_package
from verl.json_input import parse_json

_SCHEMA_S = 10.0
_FULL = "CAPACITY_REACHED"
_INVALID = "VALIDATION_ERROR"


def load(url: str, where: str) -> HostedFactory:
    try:
        import websockets.sync.client as _  # noqa: F401
    except ImportError:
        raise missing_package("websockets", "openenv", where) from None
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: expected openenv:http://HOST:PORT, or https.")
    try:
        answer = httpx.get(f"{url}/schema", timeout=_SCHEMA_S)
        answer.raise_for_status()
        schema = dict(answer.json()["action"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where}: asking {url}/schema for the fields of an action failed with {type(error).__name__}: {error}. "
            "Start the server of OpenEnv first, or correct the address."
        ) from error
    info = HostedInfo(f"openenv:{url}", [], ("reset", "user", "turn_reward"), stateful=True, server=url)
    return HostedFactory(info, functools.partial(HostedOpenEnv, url, schema))


class HostedOpenEnv(Hosted):
    """One session."""

    def __init__(self, url: str, schema: Mapping[str, Any]) -> None:
        self._url, self._schema = url, schema
        self._socket: Any = None
        self._earned: float | None = None

    async def reset(self, row: dict[str, Any]) -> str | None:
        from websockets.exceptions import ConnectionClosed, WebSocketException
        from websockets.sync.client import connect

        given = {"seed": group_seed(row), **environment_kwargs(row)}
        try:
            # A thread of its own answers the server's pings while the model writes.
            self._socket = connect(f"ws{self._url.removeprefix('http')}/ws", max_size=MAX_ANSWER_BYTES)
            with suppress(ConnectionClosed):  # it may be full, has said so and left
                self._send("reset", given)
            code, data = self._answer()
        except (OSError, WebSocketException) as error:
            raise TryAgain(f"{type(error).__name__}: {error}", full=False) from None
        if code == _FULL:
            raise TryAgain(f"{_FULL}: {data.get('message')}", full=True)
        if code:
            raise ToolFailed(f"{self._url} answered reset with {code}: {data.get('message')}")
        return observation_text(data["observation"])

    async def user(self, reply: str, messages: list[Message]) -> str | None:
        from websockets.exceptions import ConnectionClosed

        self._earned, action = None, action_of(without_thoughts(reply), self._schema)
        if isinstance(action, str):
            return action
        try:
            self._send("step", action)
            code, data = self._answer()
        except ConnectionClosed as error:
            raise ToolFailed(f"the session at {self._url} ended: {error}") from None
        if code == _INVALID:
            return f"Nothing was done: {as_text(data.get('errors') or data.get('message'))}"
        if code:
            raise ToolFailed(f"{self._url} answered a step with {code}: {data.get('message')}")
        self._earned = as_reward(data.get("reward"), "the server")
        return None if data.get("done") else observation_text(data["observation"])

    async def turn_reward(self) -> float | None:
        return self._earned

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(Exception):  # it may have gone
                self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _send(self, kind: str, data: Mapping[str, Any]) -> None:
        self._socket.send(json.dumps({"type": kind, "data": data}))

    def _answer(self) -> tuple[str, dict[str, Any]]:
        """The code of an error, or none, and the data."""
        message = parse_json(self._socket.recv())
        data = dict(message["data"])
        return (str(data.get("code")) if message["type"] == "error" else ""), data


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | str:
    """The action that a turn is; a text for the model where it is none."""
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    names = [name for name in schema.get("required", ()) if name in fields] or list(fields)
    kind = fields[names[0]].get("type") if len(names) == 1 else None
    if kind == "string":
        return {names[0]: text}
    if kind == "integer":
        number = last_integer(text)
        return "Nothing was done: end with a whole number." if number is None else {names[0]: number}
    with suppress(ValueError):
        if isinstance(action := parse_json(text[text.find("{") : text.rfind("}") + 1]), dict):
            return action
    listed = f" with {', '.join(fields)}" if fields else ""
    return f"Nothing was done: write the action as a JSON object{listed}."


def observation_text(observation: Mapping[str, Any]) -> str:
    fields = {name: each for name, each in observation.items() if name != "metadata" and each is not None}
    only = next(iter(fields.values())) if len(fields) == 1 else fields
    return as_text(only)
