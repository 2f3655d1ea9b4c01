"""Formats whose arguments stand between marks, and not as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

from verl.agents.base import ToolCall
from verl.agents.formats.base import register_tool_format
from verl.agents.formats.parts import Blocks, as_call, decode, skip_space


class _Tags(Blocks):
    """A function and its parameters, each between tags. Every argument is a text here; `schemas.fit_arguments` reads it
    by its declared type."""

    function: re.Pattern[str]
    parameter: re.Pattern[str]
    function_end: str
    parameter_end = "</parameter>"

    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        opened = self.function.match(text, position)
        if opened is None:
            raise ValueError(f"what follows {self.opening} is not the name of a function")
        arguments: dict[str, Any] = {}
        position = skip_space(text, opened.end())
        while parameter := self.parameter.match(text, position):
            name, start = parameter[1], parameter.end()
            end = text.find(self.parameter_end, start)
            if end < 0:
                raise ValueError(f"{parameter[0]} is not closed")
            if name in arguments:
                raise ValueError(f"{parameter[0]} is there twice")
            arguments[name] = self._value(text[start:end])
            position = skip_space(text, end + len(self.parameter_end))
        if not text.startswith(self.function_end, position):
            raise ValueError(f"{opened[0]} is not closed by {self.function_end}")
        return ToolCall(opened[1], arguments), position + len(self.function_end)

    def _value(self, text: str) -> str:
        return text


@register_tool_format("qwen3_coder", "<function=")
class Qwen3Coder(_Tags):
    """XML of Qwen3-Coder."""

    example = "<tool_call><function=tool><parameter=name>value</parameter></function></tool_call>"
    function = re.compile(r"<function=([^>\s]+)>")
    parameter = re.compile(r"<parameter=([^>\s]+)>")
    function_end = "</function>"

    def begin(self, name: str | None) -> str:
        return f"{self.opening}\n<function=" + ("" if name is None else f"{name}>\n")

    def _value(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix(
            "\n"
        )  # one line break at either end belongs to the format


@register_tool_format("minimax_m2", "<minimax:tool_call>")
class MiniMaxM2(_Tags):
    """MiniMax M2."""

    example = (
        '<minimax:tool_call><invoke name="tool"><parameter name="parameter">value</parameter></invoke>'
        "</minimax:tool_call>"
    )
    opening = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    function = re.compile(r'<invoke name="([^"]+)">')
    parameter = re.compile(r'<parameter name="([^"]+)">')
    function_end = "</invoke>"

    def begin(self, name: str | None) -> str:
        return f'{self.opening}\n<invoke name="' + ("" if name is None else f'{name}">\n')


@register_tool_format("glm45", "<arg_key>")
class Glm45(_Tags):
    """GLM 4.5 and later: nothing but the end of the block closes a function."""

    example = "<tool_call>tool\n<arg_key>parameter</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
    function = re.compile(r"([^\s<{]+)(?=\s*<)")
    parameter = re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>")
    parameter_end = "</arg_value>"
    function_end = ""

    def begin(self, name: str | None) -> str:
        return self.opening + ("" if name is None else f"{name}\n")

    def _block(self, text: str, position: int) -> tuple[list[ToolCall], int]:
        call, position = self._read(text, skip_space(text, position))
        if not text.startswith(self.closing, position) and position < len(text):
            raise ValueError(f"the call of {call.name} is not closed by {self.closing}")
        return [call], position + len(self.closing)


@register_tool_format("gemma4", "<|tool_call>")
class Gemma4(Blocks):
    """Gemma 4: a value as in JSON, but with keys without quotes, and texts between marks of their own."""

    example = '<|tool_call>call:tool{parameter:<|"|>value<|"|>}<tool_call|>'
    opening = "<|tool_call>"
    closing = "<tool_call|>"
    ends = ("<|tool_response>", "<turn|>")
    thinking = ("<|channel>thought", "<channel|>")
    quote = '<|"|>'
    _function = re.compile(r"call:([^\s{]+)\s*(?=\{)")
    _key = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)(?=\s*:)')

    def begin(self, name: str | None) -> str:
        return f"{self.opening}call:" + ("" if name is None else f"{name}{{")

    def _read(self, text: str, position: int) -> tuple[ToolCall, int]:
        function = self._function.match(text, position)
        if function is None:
            raise ValueError(f"what follows {self.opening} is not call: and the name of a function")
        arguments, end = self._arguments(text, function.end())
        return as_call({"name": function[1], "arguments": arguments}, "arguments"), end

    def _arguments(self, text: str, position: int) -> tuple[Any, int]:
        """The value as JSON."""
        written = []
        while True:
            end, opened = text.find(self.closing, position), text.find(self.quote, position)
            end = end if end >= 0 else len(text)
            if not 0 <= opened < end:
                break
            closed = text.find(self.quote, start := opened + len(self.quote))
            if closed < 0:
                raise ValueError(f"a text is not closed by {self.quote}")
            written += [self._with_keys(text[position:opened]), json.dumps(text[start:closed])]
            position = closed + len(self.quote)
        value, read = decode(whole := "".join([*written, self._with_keys(text[position:end])]), 0)
        if rest := whole[read:].strip():
            raise ValueError(f"the arguments are followed by {rest[:20]!r}")
        return value, end

    def _with_keys(self, part: str) -> str:
        return self._key.sub(r'\1"\2"', part)


@register_tool_format("functiongemma", "<start_function_call>")
class FunctionGemma(Gemma4):
    """FunctionGemma."""

    example = "<start_function_call>call:tool{parameter:<escape>value<escape>}<end_function_call>"
    opening = "<start_function_call>"
    closing = "<end_function_call>"
    ends = ("<start_function_response>", "<end_of_turn>")
    thinking = ("<think>", "</think>")
    quote = "<escape>"
