"""What the tool call formats share: JSON, thinking, and calls between two marks."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.formats.base import ToolFormat
from verl.json_input import check_nesting

MAX_PROBLEMS = 10
"""Calls of one turn that the model is told are wrong; saying why takes time in proportion to the turn."""


def spoken(
    text: str,
    opening: str,
    call_end: Callable[[int], int],
    thinking: tuple[str, str] = ("<think>", "</think>"),
) -> int:
    """Where the thinking before the first call ends. `opening` begins a call; `call_end` says where the one at a place
    ends, with ValueError where there is none."""
    begin, end = thinking
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


def decode(text: str, start: int) -> tuple[Any, int]:
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


def as_call(value: Any, *argument_keys: str) -> ToolCall:
    """The call a JSON object describes."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {_kind(value)}, not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('it has no "name"')
    arguments: Any = next((value[key] for key in argument_keys if key in value), {})
    if isinstance(arguments, str):  # some models write the object as a text
        arguments, _ = decode(arguments, len(arguments) - len(arguments.lstrip()))
    if not isinstance(arguments, dict):
        raise ValueError(f'"{argument_keys[0]}" is {_kind(arguments)}, not a JSON object')
    return ToolCall(name, arguments)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "a boolean", type(None): "null", dict: "an object"}
    return kinds.get(type(value), "a number")


def skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def turn_of(content: Sequence[str], calls: Sequence[ToolCall], problems: Sequence[str]) -> ParsedTurn:
    return ParsedTurn("".join(content).strip(), tuple(calls), tuple(problems))


def add_problem(tool_format: ToolFormat, problems: list[str], error: ValueError) -> None:
    """Reading must end with more than `MAX_PROBLEMS`."""
    limited = len(problems) == MAX_PROBLEMS
    problems.append("Further calls were not read." if limited else tool_format.problem(str(error)))


class Blocks(ToolFormat):
    """Calls between an opening and a closing mark. A last block that was not closed counts if it is complete."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    thinking = ("<think>", "</think>")

    @abstractmethod
    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        """The call at `position` and where it ends; ValueError says what is wrong with it."""

    def parse(self, text: str) -> ParsedTurn:
        position = spoken(
            text, self.opening, lambda at: self._block(text, at + len(self.opening))[1], self.thinking
        )
        content, calls = [text[:position]], []
        problems: list[str] = []
        while len(problems) <= MAX_PROBLEMS and (start := text.find(self.opening, position)) >= 0:
            content.append(text[position:start])
            position = start + len(self.opening)
            try:
                found, position = self._block(text, position)
                calls += found
            except ValueError as error:
                add_problem(self, problems, error)
                position = self._resume(text, position)
        return turn_of([*content, text[position:]], calls, problems)

    def _resume(self, text: str, position: int) -> int:
        """Where a block ends that could not be read."""
        end = text.find(self.closing, position)
        return end + len(self.closing) if end >= 0 else len(text)

    def _block(self, text: str, position: int) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while True:
            position = skip_space(text, position)
            if calls and text.startswith(self.closing, position):
                return calls, position + len(self.closing)
            if calls and position == len(text):
                return calls, position
            call, position = self._read(text, position)
            calls.append(call)


class HeadedJson(Blocks):
    """Blocks whose calls are JSON arguments between a head, which names the function, and a tail."""

    head: re.Pattern[str]
    """Its groups are `name` and, where the format has one, `id`."""
    tail = re.compile("")

    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        head = self.head.match(text, position)
        if head is None:
            raise ValueError(f"what follows {self.opening} is not the name of a function and its arguments")
        arguments, end = decode(text, skip_space(text, head.end()))
        tail = self.tail.match(text, end)
        if tail is None:
            raise ValueError(
                f"something else than the end of the call follows its arguments: {text[end : end + 20]!r}"
            )
        named = head.groupdict()
        call = as_call({"name": named["name"], "arguments": arguments}, "arguments")
        return replace(call, id=named.get("id") or ""), tail.end()
