"""How models write tool calls: the text of a turn becomes calls, or a reason for the model why one cannot be read.

A call inside a thinking block is thought about, not made.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from verl.agents.base import ParsedTurn, ToolCall
from verl.errors import ConfigError
from verl.json_input import check_nesting

_KEY = "multi_turn.format"
_MAX_PROBLEMS = 10
"""Calls of one turn that the model is told are wrong; saying why takes time in proportion to the turn."""


class ToolFormat(ABC):
    """One way of writing calls."""

    example: str
    """How one call looks, for the model that got it wrong."""

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """Take a turn apart. Never raises: what cannot be read becomes a problem."""

    opening: str | None = None
    """What stands before every call, where there is such a mark."""

    def begin(self, name: str | None) -> str | None:
        """The beginning of a call, up to its arguments where the function is named; None: a call cannot be begun."""
        return None

    def problem(self, why: str) -> str:
        return f"The tool call could not be read: {why}. Write a call like this: {self.example}"


_Format = TypeVar("_Format", bound=type[ToolFormat])
_formats: dict[str, type[ToolFormat]] = {}


def register_tool_format(name: str) -> Callable[[_Format], _Format]:
    """Make a ToolFormat known as `multi_turn.format=<name>`."""

    def add(kind: _Format) -> _Format:
        _formats[name] = kind
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


# What a template contains -> the format. Order matters: Qwen3-Coder's has <tool_call> as well.
_MARKS = {"<function=": "qwen3_coder", "<|python_tag|>": "llama3_json"}
# Formats that are not read here; without this list their models would be taken for hermes and never make a call.
_FOREIGN = {
    "[TOOL_CALLS]": "Mistral",
    "tool▁calls▁begin": "DeepSeek",
    "<|tool_calls_section_begin|>": "Kimi",
    "<arg_key>": "GLM",
    "<|channel|>": "gpt-oss",
    "minimax:tool_call": "MiniMax",
    "<|tool_call>": "Gemma",
}


def detect_format(chat_template: str) -> str:
    """The format a chat template shows the model; hermes where it shows none, as then we describe the tools."""
    for mark, name in _MARKS.items():
        if mark in chat_template:
            return name
    for mark, family in _FOREIGN.items():
        if mark in chat_template:
            raise ConfigError(
                f"The chat template writes tool calls in the format of {family} ({mark}), which is not known; "
                f"known: {', '.join(known_formats())}. Set {_KEY} to one of these, or register one with "
                f"register_tool_format in a module named in trainer.plugins."
            )
    return "hermes"


# ---- parts the formats share


def _spoken(text: str, opening: str, call_end: Callable[[int], int]) -> int:
    """Where the thinking before the first call ends. `opening` begins a call; `call_end` says where the one at a place
    ends, with ValueError where there is none."""
    begin, end = "<think>", "</think>"
    # A template may have opened the first block in the prompt, so its closing mark decides.
    closing, call, after = text.find(end), text.find(opening), 0
    with suppress(ValueError):
        # Unless it is text of an argument: nothing was opened before the call that contains it.
        while 0 <= call < closing and text.find(begin, after, call) < 0:
            after = call_end(call)
            closing = text.find(end, after) if after > closing else closing
            call = text.find(opening, after)
    position = closing + len(end) if closing >= 0 else 0
    while (start := text.find(begin, position)) >= 0:
        if opening in text[position:start]:
            break
        closed = text.find(end, start)
        if closed < 0:
            return len(text)  # still thinking when the turn ended
        position = closed + len(end)
    return position


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends; ValueError says what is wrong with it."""
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        where = f"near {near!r}" if near.strip() else "at its end"
        raise ValueError(f"it is not valid JSON ({error.msg} {where})") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    check_nesting(value)
    try:
        text[start:end].encode()
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no pipe or tokenizer takes
        raise ValueError("it contains an invalid Unicode character") from None
    return value, end


def _call(value: Any, *argument_keys: str) -> ToolCall:
    """The call a JSON object describes."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {_kind(value)}, not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('it has no "name"')
    arguments: Any = next((value[key] for key in argument_keys if key in value), {})
    if isinstance(arguments, str):  # some models write the object as a text
        arguments, _ = _decode(arguments, len(arguments) - len(arguments.lstrip()))
    if not isinstance(arguments, dict):
        raise ValueError(f'"{argument_keys[0]}" is {_kind(arguments)}, not a JSON object')
    return ToolCall(name, arguments)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "a boolean", type(None): "null", dict: "an object"}
    return kinds.get(type(value), "a number")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _turn(content: Sequence[str], calls: Sequence[ToolCall], problems: Sequence[str]) -> ParsedTurn:
    return ParsedTurn("".join(content).strip(), tuple(calls), tuple(problems))


# ---- the formats


class _Blocks(ToolFormat):
    """Calls between an opening and a closing mark. A last block that was not closed counts if it is complete."""

    opening = "<tool_call>"
    closing = "</tool_call>"

    @abstractmethod
    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        """The call at `position` and where it ends; ValueError says what is wrong with it."""

    def parse(self, text: str) -> ParsedTurn:
        position = _spoken(text, self.opening, lambda at: self._block(text, at + len(self.opening))[1])
        content, calls = [text[:position]], []
        problems: list[str] = []
        while len(problems) <= _MAX_PROBLEMS and (start := text.find(self.opening, position)) >= 0:
            content.append(text[position:start])
            position = start + len(self.opening)
            try:
                found, position = self._block(text, position)
                calls += found
            except ValueError as error:
                limited = len(problems) == _MAX_PROBLEMS
                problems.append("Further calls were not read." if limited else self.problem(str(error)))
                end = text.find(self.closing, position)
                position = end + len(self.closing) if end >= 0 else len(text)
        return _turn([*content, text[position:]], calls, problems)

    def _block(self, text: str, position: int) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while True:
            position = _skip_space(text, position)
            if calls and text.startswith(self.closing, position):
                return calls, position + len(self.closing)
            if calls and position == len(text):
                return calls, position
            call, position = self._read(text, position)
            calls.append(call)


@register_tool_format("hermes")
class Hermes(_Blocks):
    """JSON in <tool_call>: Hermes, Qwen 2.5, Qwen 3 and many others."""

    example = '<tool_call>{"name": "tool", "arguments": {"parameter": "value"}}</tool_call>'

    def begin(self, name: str | None) -> str:
        named = "" if name is None else f'{name}", "arguments": '
        return f'{self.opening}\n{{"name": "{named}'

    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        value, end = _decode(text, position)
        return _call(value, "arguments", "parameters"), end


@register_tool_format("qwen3_coder")
class Qwen3Coder(_Blocks):
    """XML of Qwen3-Coder. Every argument is a text here; `schemas.fit_arguments` reads it by its declared type."""

    example = "<tool_call><function=tool><parameter=name>value</parameter></function></tool_call>"
    _function = re.compile(r"<function=([^>\s]+)>")
    _parameter = re.compile(r"<parameter=([^>\s]+)>")

    def begin(self, name: str | None) -> str:
        return f"{self.opening}\n<function=" + ("" if name is None else f"{name}>\n")

    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        opened = self._function.match(text, position)
        if opened is None:
            raise ValueError(f"there is no <function=...> in {self.opening}")
        arguments: dict[str, Any] = {}
        position = _skip_space(text, opened.end())
        while parameter := self._parameter.match(text, position):
            name, start = parameter.group(1), parameter.end()
            end = text.find("</parameter>", start)
            if end < 0:
                raise ValueError(f"<parameter={name}> is not closed")
            if name in arguments:
                raise ValueError(f"<parameter={name}> is there twice")
            # One line break at either end belongs to the format.
            arguments[name] = text[start:end].removeprefix("\n").removesuffix("\n")
            position = _skip_space(text, end + len("</parameter>"))
        if not text.startswith("</function>", position):
            raise ValueError(f"<function={opened.group(1)}> is not closed by </function>")
        return ToolCall(opened.group(1), arguments), position + len("</function>")


@register_tool_format("llama3_json")
class Llama3Json(ToolFormat):
    """The whole turn is JSON, or what follows <|python_tag|>; several calls are separated by semicolons."""

    example = '{"name": "tool", "parameters": {"parameter": "value"}}'
    _tag = "<|python_tag|>"

    def begin(self, name: str | None) -> str:
        return '{"name": "' + ("" if name is None else f'{name}", "parameters": ')

    _looks_like_call = re.compile(r'\{(?=.*"name")(?=.*"(?:parameters|arguments)")', re.DOTALL)

    def parse(self, text: str) -> ParsedTurn:
        begin = _spoken(text, "{", lambda at: _decode(text, at)[1])
        tag = text.find(self._tag, begin)
        start = _skip_space(text, tag + len(self._tag) if tag >= 0 else begin)
        # A turn may be JSON without being a call.
        if tag < 0 and not self._looks_like_call.match(text, start):
            return _turn([text], [], [])
        before, calls, position = text[: tag if tag >= 0 else begin], [], start
        try:
            while True:
                value, position = _decode(text, position)
                calls.append(_call(value, "parameters", "arguments"))
                position = _skip_space(text, position)
                if not text.startswith(";", position):
                    break
                position = _skip_space(text, position + 1)
        except ValueError as error:
            return _turn([before], calls, [self.problem(str(error))])
        rest = text[position:].removesuffix("<|eom_id|>").removesuffix("<|eot_id|>")
        return _turn([before, rest], calls, [])
