"""What runs in a tool process: plain functions, or one object (environment, user) of one conversation.

Nothing here knows of processes: whoever calls a `Hosted` object limits its time and survives its crashes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agents.base import Message, Schema, ToolFailed
from verl.agents.schemas import ToolFunction

HOOKS = ("reset", "user", "turn_reward", "reward")


@dataclass(frozen=True)
class HostedInfo:
    """What the trainer must know of user code: plain data, as it comes from another process."""

    name: str
    schemas: list[Schema]
    hooks: tuple[str, ...]
    """Which of `HOOKS` there are."""
    stateful: bool
    """One instance per conversation; False: any process may run any call."""
    columns: tuple[str, ...] = ()
    """Columns a row must have, because `reset` asks for them."""
    replaceable: bool = False
    """Whether a process that ended is replaced by a new one, which is reset with the same row."""
    server: str = ""
    """The address that `reset` waits for with TryAgain."""


Called = tuple[str, float | None]
"""The result of a call, and the reward that the tool gave for it."""


class Hosted:
    """User code of one kind behind one interface. Exceptions of the user's code pass through."""

    async def reset(self, row: dict[str, Any]) -> str | None:
        """Begin a conversation; a text is added to the prompt."""
        return None

    async def call(self, name: str, arguments: dict[str, Any]) -> str | Called:
        """Run a tool. ToolFailed where the arguments do not fit."""
        raise ToolFailed(f"There is no tool {name!r}.", "unknown")

    async def user(self, reply: str, messages: list[Message]) -> str | None:
        """What the user answers; None ends the conversation. `messages` ends with the reply."""
        return None

    async def turn_reward(self) -> float | None:
        """Of the model's last turn; to be asked after the turn's calls and the user's answer."""
        return None

    async def reward(self) -> float | None:
        """Of the whole conversation; to be asked at its end."""
        return None

    async def close(self) -> None:
        """Free what the conversation held."""


@dataclass(frozen=True)
class HostedFactory:
    """Makes what `info` describes; `create` is called in the process that runs it."""

    info: HostedInfo
    create: Callable[[], Hosted]


class HostedFunctions(Hosted):
    """Plain functions."""

    def __init__(self, tools: Sequence[tuple[ToolFunction, Callable[..., Any]]]) -> None:
        self._tools = {tool.name: (tool, function) for tool, function in tools}

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._tools:
            raise ToolFailed(f"There is no tool {name!r}. Tools: {', '.join(self._tools)}.", "unknown")
        tool, function = self._tools[name]
        return as_text(await finished(function(**tool.arguments(arguments))))


class HostedObject(HostedFunctions):
    """One instance of a user's class, its methods as tools."""

    def __init__(self, kind: type, tools: Sequence[tuple[ToolFunction, str]], hooks: Sequence[str]) -> None:
        self._object = kind()
        self._hooks = hooks
        super().__init__([(tool, getattr(self._object, method)) for tool, method in tools])

    async def reset(self, row: dict[str, Any]) -> str | None:
        if "reset" not in self._hooks:
            return None
        takes = parameters_of(self._object.reset)
        columns = {name: value for name, value in row.items() if takes.takes_any or name in takes.names}
        return _text_or_none(await self._hook("reset", **columns), "reset")

    async def user(self, reply: str, messages: list[Message]) -> str | None:
        if "user" not in self._hooks:
            return None
        takes = parameters_of(self._object.user)
        both = len(takes.names) > 1 or takes.any_number
        return _text_or_none(await self._hook("user", *((reply, messages) if both else (reply,))), "user")

    async def turn_reward(self) -> float | None:
        return as_reward(await self._hook("turn_reward"), "turn_reward")

    async def reward(self) -> float | None:
        return as_reward(await self._hook("reward"), "reward")

    async def _hook(self, name: str, *arguments: Any, **named: Any) -> Any:
        """What the hook returns; None where the class has none."""
        if name not in self._hooks:
            return None
        return await finished(getattr(self._object, name)(*arguments, **named))

    async def close(self) -> None:
        if callable(close := getattr(self._object, "close", None)):
            await finished(close())


# ---- values between user code and us


async def finished(value: Any) -> Any:
    """A value, or that of a coroutine."""
    if not inspect.isawaitable(value):
        return value
    await asyncio.sleep(0)  # a request's first step runs outside the event loop (`verl.user_process.Steps`)
    return await value


def as_text(value: Any) -> str:
    """A tool's result as the model reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)


def as_reward(value: Any, of: str) -> float | None:
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{of} returned {value!r:.100}, not a number or None") from None
    if not math.isfinite(reward):
        raise ValueError(f"{of} returned {reward}; a reward must be finite")
    return reward


def _text_or_none(value: Any, of: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{of} returned {value!r:.100}, not a text or None")
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    for method in ("model_dump", "tolist"):  # pydantic; numpy and torch
        if callable(convert := getattr(value, method, None)):
            return convert()
    return list(value) if isinstance(value, set | frozenset) else str(value)


# ---- parameters


@dataclass(frozen=True)
class Parameters:
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool
    """It has **kwargs."""
    any_number: bool
    """It has *args."""


def parameters_of(function: Callable[..., Any], method: bool = False) -> Parameters:
    """`method`: the first parameter is the instance."""
    every = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    named = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Parameters(
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in every),
        any_number=any(p.kind is p.VAR_POSITIONAL for p in every),
    )
