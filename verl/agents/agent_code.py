"""A user's agent in its process: a function or a program that talks to the policy as to OpenAI or Anthropic."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from verl.agents.base import ToolFailed
from verl.agents.hosted import Hosted, HostedFactory, HostedInfo, as_reward, as_text, finished, parameters_of
from verl.errors import ConfigError
from verl.json_input import parse_json
from verl.user_code import attribute, import_path

_KEY = "multi_turn.agent"


def load_agent(spec: str, *, command: bool) -> HostedFactory:
    """The function at file.py:name or module:name, or a command line."""
    info = HostedInfo(name=spec, schemas=[], hooks=(), stateful=True)
    if command:
        try:
            words = shlex.split(spec)
        except ValueError as error:
            raise ConfigError(f"{_KEY}_command={spec!r} is no command line: {error}.") from None
        if not words:
            raise ConfigError(f"{_KEY}_command={spec!r} names no program.")
        return HostedFactory(info, functools.partial(HostedProgram, words))
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{_KEY}={spec!r}: expected file.py:function or module:function.")
    module, _ = import_path(path, name, _KEY, ConfigError)
    function = attribute(module, name)
    if not callable(function):
        there = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"{_KEY}={spec}: there is no function {name}. There are: {', '.join(there)}.")
    if not parameters_of(function).names:
        raise ConfigError(f"{_KEY}={spec}: {name} must take the row, and may take base_url and api_key.")
    return HostedFactory(info, functools.partial(HostedAgent, function))


class HostedAgent(Hosted):
    """A function, plain or async."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        os.environ.update(addresses(base_url, api_key))
        takes, given = parameters_of(self._function), {"base_url": base_url, "api_key": api_key}
        named = {name: value for name, value in given.items() if takes.takes_any or name in takes.names}
        return outcome(await finished(self._function(row, **named)))


class HostedProgram(Hosted):
    """A program, started for every conversation."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        try:
            ended = subprocess.run(
                self._words,
                input=as_text(row).encode(),
                stdout=subprocess.PIPE,
                env={**os.environ, **addresses(base_url, api_key)},
                check=False,
            )
        except OSError as error:
            raise ToolFailed(f"{self._words[0]} cannot be started: {error}") from None
        lines = [line for line in ended.stdout.decode(errors="replace").splitlines() if line.strip()]
        if ended.returncode:
            last = f"; it printed last: {lines[-1][:200]}" if lines else ""
            raise ToolFailed(f"{self._words[0]} ended with status {ended.returncode}{last}")
        try:
            value = parse_json(lines[-1]) if lines else None
        except ValueError:
            return None  # what it prints is its own affair
        return outcome(value) if isinstance(value, int | float | dict) else None


def addresses(base_url: str, api_key: str) -> dict[str, str]:
    """Where clients look for the server and its key. Anthropic's adds /v1 itself."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


def outcome(value: Any) -> float | dict[str, Any] | None:
    """What an agent returned: a reward, or a dict with its reward and more for the record; JSON takes it."""
    if not isinstance(value, Mapping):
        return as_reward(value, "the agent")
    plain: dict[str, Any] = json.loads(as_text(dict(value)))
    if "reward" in plain:
        plain["reward"] = as_reward(plain["reward"], "the agent")
    return plain
