"""A tool call format, and which ones there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from verl.agents.base import Message, ParsedTurn, Schema
from verl.errors import ConfigError

_KEY = "multi_turn.format"


class ToolFormat(ABC):
    """One way of writing calls."""

    example: str
    """How one call looks, for the model that got it wrong."""

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """Take a turn apart. Never raises: what cannot be read becomes a problem."""

    def read(self, text: str, tools: Sequence[Schema]) -> ParsedTurn:
        """Take apart a turn of an agent of the user's, whose request offers these tools."""
        return self.parse(text)

    template_marks: tuple[str, ...] = ()
    """Of its chat templates, as registered."""

    opening: str | None = None
    """What stands before every call, where there is such a mark."""

    ends: tuple[str, ...] = ()
    """The special tokens that end a turn, where the one that the template writes after an answer is not all of them."""

    wraps_content = False
    """Whether marks of the format stand around the content, too, so that a turn without a call must be parsed."""

    def begin(self, name: str | None) -> str | None:
        """The beginning of a call, up to its arguments where the function is named; None: a call cannot be begun."""
        return None

    def visible(self, text: str) -> str:
        """The content of a turn that goes on, as far as no call can begin there."""
        if self.opening is None:
            return ""
        before, mark, _ = text.partition(self.opening)
        if not mark:
            lengths = range(min(len(self.opening) - 1, len(text)), 0, -1)
            begun = next((length for length in lengths if text.endswith(self.opening[:length])), 0)
            before = text[: len(text) - begun]
        return before.rstrip()  # white space before a call is not part of the content

    def apart(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the calls of the model apart from its text, each answer after its call. The answers to
        a turn with a call that cannot be read are the user's."""
        found: list[Message] = []
        as_user = False
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and "tool_calls" not in message:
                parsed, ids = self.parse(str(message["content"])), _answered(messages[number + 1 :])
                as_user = not parsed.calls or bool(parsed.problems)
                found.append(self._spoken(message, parsed, [] if as_user else ids))
            elif "tool_call_id" in message:
                found.append({**message, "role": "user" if as_user else "tool"})
            else:
                as_user = False
                found.append(message)
        return found

    def _spoken(self, message: Message, parsed: ParsedTurn, ids: Sequence[str]) -> Message:
        if not ids:
            return {**message, "content": parsed.content} if self.wraps_content else message
        # The thinking before a call stays; templates that take it apart take no content beside it.
        written = (
            {"content": "", "thinking": parsed.thinking} if parsed.thinking else {"content": parsed.content}
        )
        calls = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(ids, parsed.calls, strict=False)
        ]
        return {**message, **written, "tool_calls": calls}

    def problem(self, why: str) -> str:
        return f"The tool call could not be read: {why}. Write a call like this: {self.example}"


def _answered(following: Sequence[Message]) -> list[str]:
    """The calls that the next messages answer."""
    ids: list[str] = []
    for message in following:
        if "tool_call_id" not in message:
            break
        ids.append(str(message["tool_call_id"]))
    return ids


_Format = TypeVar("_Format", bound=type[ToolFormat])
_formats: dict[str, type[ToolFormat]] = {}


def register_tool_format(name: str, *marks: str) -> Callable[[_Format], _Format]:
    """Make a ToolFormat known as `multi_turn.format=<name>`; it is that of chat templates with all of these marks."""

    def add(kind: _Format) -> _Format:
        _formats[name] = kind
        kind.template_marks = marks
        return kind

    return add


_parsers: set[str] = set()


def add_parser_name(name: str) -> None:
    """Make the name of a `ToolParser` known, with which agent loops read calls."""
    _parsers.add(name)


def parser_names() -> set[str]:
    return _parsers - _formats.keys()


def known_formats() -> list[str]:
    return sorted({*_formats, *_parsers})


def get_format(name: str) -> ToolFormat:
    if name not in _formats:
        raise ConfigError(f"{_KEY}={name!r} is not known; known: auto, {', '.join(known_formats())}.")
    return _formats[name]()


def detect_format(chat_template: str) -> str:
    """The format a chat template shows the model; hermes where it shows none, as then we describe the tools."""
    for name, kind in _formats.items():
        if kind.template_marks and all(mark in chat_template for mark in kind.template_marks):
            return name
    return "hermes"
