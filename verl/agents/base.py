"""What the parts of a conversation exchange: calls, their outcomes, and the interfaces of tools and users.

Coroutines of these interfaces run in one event loop, in a thread of their own (`verl/agents/toolset.py`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl.errors import ToolsLost as ToolsLost

Schema = Mapping[str, Any]
"""An OpenAI function schema: {"type": "function", "function": {"name", "description", "parameters"}}."""
Message = dict[str, Any]
FailureKind = Literal["failed", "timeout", "unknown", "malformed"]
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call the model wrote."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the model, taken apart by a tool call format."""

    content: str
    """What is outside the calls."""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    """One text for the model per call that could not be read."""
    thinking: str = ""
    """Where the format takes it apart."""


class ToolFailed(Exception):
    """A call without a result. The text is what the model gets to read: short, without a traceback."""

    def __init__(self, text: str, kind: FailureKind = "failed") -> None:
        super().__init__(text)
        self.text = text
        self.kind = kind


class TryAgain(ToolFailed):
    """The server of an environment takes no conversation now: it has as many as it may (`full`), or it is away."""

    def __init__(self, text: str, full: bool) -> None:
        super().__init__(text)
        self.full = full


class ToolProvider(ABC):
    """Tools from one source."""

    @property
    @abstractmethod
    def schemas(self) -> Sequence[Schema]:
        """Of its tools; known after `open`."""

    async def open(self) -> None:  # noqa: B027 - some are opened by what they are made from
        """Connect and read the schemas. ConfigError names the key, the address or path, and what was tried."""

    @abstractmethod
    async def call(self, key: str, call: ToolCall, timeout_s: float) -> str:
        """The result as text, within `timeout_s`; `key` names the conversation, the tool is one of `schemas`.
        ToolFailed: for the model to read; ToolsLost: the run must stop."""

    async def end(self, key: str) -> None:  # noqa: B027 - most tools keep nothing per conversation
        """The conversation is over: free what is kept for it."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect and end processes. Safe to call twice."""


@dataclass(frozen=True)
class Observation:
    """What a server that reads whole turns answers."""

    text: str
    done: bool = False
    valid: bool = True


@dataclass
class ToolRecord:
    """A call and its outcome, for metrics and the run folder."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    result: str = ""
    failure: FailureKind | None = None
    seconds: float = 0.0
    reward: float | None = None
    """That the tool gave for this call."""
    call_id: str = ""
    """That the model gave it."""


def row_column(row: Mapping[str, Any], name: str) -> Any:
    """A column of the row, or the entry of that name in its extra_info."""
    value, extra = row.get(name), row.get("extra_info")
    return extra.get(name) if value is None and isinstance(extra, Mapping) else value


def without_thoughts(text: str) -> str:
    return _THOUGHT.sub("", text).strip()
