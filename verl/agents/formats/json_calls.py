"""Formats whose arguments are JSON."""

from __future__ import annotations

import re
from dataclasses import replace

from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.formats.base import ToolFormat, register_tool_format
from verl.agents.formats.parts import (
    MAX_PROBLEMS,
    Blocks,
    HeadedJson,
    add_problem,
    as_call,
    decode,
    skip_space,
    spoken,
    turn_of,
)


@register_tool_format("hermes")
class Hermes(Blocks):
    """JSON in <tool_call>: Hermes, Qwen 2.5, Qwen 3 and many others."""

    example = '<tool_call>{"name": "tool", "arguments": {"parameter": "value"}}</tool_call>'

    def begin(self, name: str | None) -> str:
        named = "" if name is None else f'{name}", "arguments": '
        return f'{self.opening}\n{{"name": "{named}'

    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        value, end = decode(text, position)
        return as_call(value, "arguments", "parameters"), end


@register_tool_format("llama3_json", "<|python_tag|>")
class Llama3Json(ToolFormat):
    """The whole turn is JSON, or what follows <|python_tag|>; several calls are separated by semicolons."""

    example = '{"name": "tool", "parameters": {"parameter": "value"}}'
    _tag = "<|python_tag|>"

    def begin(self, name: str | None) -> str:
        return '{"name": "' + ("" if name is None else f'{name}", "parameters": ')

    _looks_like_call = re.compile(r'\{(?=.*"name")(?=.*"(?:parameters|arguments)")', re.DOTALL)

    def parse(self, text: str) -> ParsedTurn:
        begin = spoken(text, "{", lambda at: decode(text, at)[1])
        tag = text.find(self._tag, begin)
        start = skip_space(text, tag + len(self._tag) if tag >= 0 else begin)
        # A turn may be JSON without being a call.
        if tag < 0 and not self._looks_like_call.match(text, start):
            return turn_of([text], [], [])
        before, calls, position = text[: tag if tag >= 0 else begin], [], start
        try:
            while True:
                value, position = decode(text, position)
                calls.append(as_call(value, "parameters", "arguments"))
                position = skip_space(text, position)
                if not text.startswith(";", position):
                    break
                position = skip_space(text, position + 1)
        except ValueError as error:
            return turn_of([before], calls, [self.problem(str(error))])
        rest = text[position:].removesuffix("<|eom_id|>").removesuffix("<|eot_id|>")
        return turn_of([before, rest], calls, [])


@register_tool_format("mistral_v11", "[TOOL_CALLS]", "[ARGS]")
class MistralV11(HeadedJson):
    """Mistral since its tokenizer version 11: a mark, the name and JSON, for each call."""

    example = '[TOOL_CALLS]tool[ARGS]{"parameter": "value"}'
    opening = "[TOOL_CALLS]"
    thinking = ("[THINK]", "[/THINK]")
    head = re.compile(r"(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?(?=\s*\{)")

    def begin(self, name: str | None) -> str:
        return self.opening + ("" if name is None else f"{name}[ARGS]")

    def _block(self, text: str, position: int) -> tuple[list[ToolCall], int]:
        """Nothing closes it."""
        call, position = self._read(text, skip_space(text, position))
        return [call], position

    def _resume(self, text: str, position: int) -> int:
        following = text.find(self.opening, position)
        return following if following >= 0 else len(text)


@register_tool_format("mistral", "[TOOL_CALLS]")
class Mistral(MistralV11):
    """Mistral before: a JSON list of all calls."""

    example = '[TOOL_CALLS][{"name": "tool", "arguments": {"parameter": "value"}}]'
    thinking = ("<think>", "</think>")

    def begin(self, name: str | None) -> str:
        return self.opening + '[{"name": "' + ("" if name is None else f'{name}", "arguments": ')

    def _block(self, text: str, position: int) -> tuple[list[ToolCall], int]:
        position = skip_space(text, position)
        if not text.startswith("[", position):
            return super()._block(text, position)
        values, end = decode(text, position)
        if not values:
            raise ValueError("the list has no calls")
        calls = [(as_call(value, "arguments", "parameters"), value.get("id")) for value in values]
        return [replace(call, id=str(call_id or "")) for call, call_id in calls], end


@register_tool_format("deepseek_v3", "<｜tool▁calls▁begin｜>", "```json")
class DeepSeekV3(HeadedJson):
    """DeepSeek V3 and R1: the arguments stand in a code block."""

    example = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tool\n```json\n"
        '{"parameter": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    opening = "<｜tool▁calls▁begin｜>"
    closing = "<｜tool▁calls▁end｜>"
    head = re.compile(
        r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>\s*(?=[^\s<{`]+\s*`))?(?P<name>[^\s<{`]+)"
        r"\s*(?:<｜tool▁sep｜>|```(?:json)?)(?=\s*\{)"
    )
    tail = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")

    def begin(self, name: str | None) -> str:
        named = "" if name is None else f"function<｜tool▁sep｜>{name}\n```json\n"
        return f"{self.opening}<｜tool▁call▁begin｜>{named}"


@register_tool_format("deepseek_v31", "<｜tool▁calls▁begin｜>")
class DeepSeekV31(DeepSeekV3):
    """DeepSeek V3.1: the arguments follow the name."""

    example = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool<｜tool▁sep｜>{"parameter": "value"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )

    def begin(self, name: str | None) -> str:
        return f"{self.opening}<｜tool▁call▁begin｜>" + ("" if name is None else f"{name}<｜tool▁sep｜>")


@register_tool_format("kimi_k2", "<|tool_calls_section_begin|>")
class KimiK2(HeadedJson):
    """Kimi K2: the id of a call is its function and how many calls the conversation had before."""

    example = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.tool:0<|tool_call_argument_begin|>"
        '{"parameter": "value"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    opening = "<|tool_calls_section_begin|>"
    closing = "<|tool_calls_section_end|>"
    head = re.compile(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)"
        r"\s*<\|tool_call_argument_begin\|>"
    )
    tail = re.compile(r"\s*<\|tool_call_end\|>")

    def begin(self, name: str | None) -> str:
        named = "" if name is None else f"{name}:0<|tool_call_argument_begin|>"
        return f"{self.opening}<|tool_call_begin|>functions.{named}"


@register_tool_format("gpt-oss", "<|channel|>")
class GptOss(ToolFormat):
    """The messages of harmony, each with a channel: analysis is thinking; a call is a message to a function."""

    example = (
        '<|channel|>commentary to=functions.tool <|constrain|>json<|message|>{"parameter": "value"}<|call|>'
    )
    ends = ("<|call|>", "<|return|>")
    wraps_content = True
    _body = "<|message|>"
    _recipient = re.compile(r"to=(?:functions\.)?([^\s<]+)")
    _end = re.compile(r"<\|(?:end|call|return|start)\|>|\Z")
    _mark_begun = re.compile(r"<(?:\|\w*\|?)?\Z")

    def begin(self, name: str | None) -> str:
        named = "" if name is None else f"{name} <|constrain|>json{self._body}"
        return f"<|channel|>commentary to=functions.{named}"

    def visible(self, text: str) -> str:
        return self.parse(self._mark_begun.sub("", text)).content if self._body in text else ""

    def parse(self, text: str) -> ParsedTurn:
        if self._body not in text:
            return turn_of([text], [], [])
        content: list[str] = []
        thinking: list[str] = []
        problems: list[str] = []
        calls, position = [], 0
        while len(problems) <= MAX_PROBLEMS and (mark := text.find(self._body, position)) >= 0:
            header, start = text[position:mark], mark + len(self._body)
            recipient = self._recipient.search(header)
            position = self._until(text, start)
            if recipient is not None:
                try:
                    arguments, end = decode(text, skip_space(text, start))
                    calls.append(as_call({"name": recipient[1], "arguments": arguments}, "arguments"))
                    position = self._until(text, end)  # its texts may have marks
                except ValueError as error:
                    add_problem(self, problems, error)
            else:
                (thinking if "<|channel|>analysis" in header else content).append(text[start:position])
        turn = turn_of(["\n".join(content)], calls, problems)
        return replace(turn, thinking="\n".join(thinking))

    def _until(self, text: str, position: int) -> int:
        end = self._end.search(text, position)
        assert end is not None
        return end.start()
