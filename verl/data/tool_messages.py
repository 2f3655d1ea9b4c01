"""Tools, tool calls and their answers in the forms files have them, made into what chat templates take.

A template that does not write `tool_calls` gets them as text, in the form that `tools_text` describes to the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.errors import DataError
from verl.json_input import parse_json

Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""OpenAI function schemas."""

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Find a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
"""A tool to try a template with."""


def probe_call(word: str) -> dict[str, Any]:
    """An assistant message that calls the tool to try a template with. Some templates want ids of nine characters."""
    call = {"name": "lookup", "arguments": {"word": word}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
    }


def tools_text(tools: Tools) -> str:
    """The tools for a template that has no place for them, and how to call one (format hermes)."""
    schemas = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. They are listed between <tools> and </tools>, one JSON object per line:\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "To call one, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>\n'
        "The result comes back between <tool_response> and </tool_response>."
    )


def answer_text(text: str) -> str:
    """A tool's answer for a template that has no role for tools."""
    return f"<tool_response>\n{text}\n</tool_response>"


def short_call_id(call_id: str) -> str:
    """An id of nine letters or digits, as some templates want them."""
    nine = re.fullmatch("[a-zA-Z0-9]{9}", call_id) is not None
    return call_id if nine else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def join_answers(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Tools that answer as the user do so in one message: many templates refuse two of one role in a row."""
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] == last.get("role") == "user" and "tool_call_id" in last:
            joined[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            joined.append(dict(message))
    return joined


# -- reading rows


def as_tools(value: Any, where: str, key: str = "data.tools_key") -> list[dict[str, Any]]:
    """The schemas in a row's column: a list, or JSON text of one; bare functions are wrapped."""
    read = _parsed(value)
    if read is None or (isinstance(value, str) and not value.strip()):
        return []
    tools: list[Any] = [_parsed(each) for each in read] if isinstance(read, list) else [None]
    schemas = [_filled(tool) if "function" in tool else _wrapped(tool) for tool in tools if _is_tool(tool)]
    if len(schemas) < len(tools):
        raise DataError(
            f"The tools of {where} ({key}) must be a list of JSON schemas of functions, or JSON text of one, "
            f"got {str(value)[:200]!r}. To leave the column out, set {key}=none."
        )
    return schemas


def as_call_list(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The calls of a message, each as `{"function": {"name", "arguments"}}` with arguments as a mapping: templates turn
    them into text themselves."""
    calls = _parsed(value)
    if calls is not None and not isinstance(calls, list):
        raise DataError(f"'tool_calls' of {where} must be a list, got {str(calls)[:200]!r}.")
    if calls and role != "assistant":
        raise DataError(f"{where} has 'tool_calls', but its role is {role!r}: only 'assistant' may.")
    return [_call(_parsed(call), where) for call in calls or ()]


def _call(value: Any, where: str) -> dict[str, Any]:
    call = _wrapped(value) if isinstance(value, Mapping) and "function" not in value else value
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"A call in 'tool_calls' of {where} has no function with a name: {str(value)[:200]!r}."
        )
    given = function.get("arguments")
    arguments = _parsed(given) if given not in (None, "") else {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"'arguments' of the call of {function['name']!r} in {where} must be a mapping or JSON text of one, "
            f"got {str(given)[:200]!r}."
        )
    if not isinstance(given, str):
        arguments = _filled(arguments)
    rest = {name: value for name, value in call.items() if value is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _parsed(value: Any) -> Any:
    """JSON text as its value; what is no JSON text as it is."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, str):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return list(value) if isinstance(value, tuple) else value


def _filled(value: Any) -> Any:
    """Without the None that table formats fill in where only other rows have a field."""
    if isinstance(value, Mapping):
        return {name: _filled(each) for name, each in value.items() if each is not None}
    if isinstance(value, np.ndarray | list | tuple):
        return [_filled(each) for each in value]
    return value


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _wrapped(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function without the outer layer; an id belongs to that."""
    inner = {name: value for name, value in _filled(function).items() if name not in ("id", "type")}
    outer = {"id": function["id"]} if function.get("id") else {}
    return {"type": "function", **outer, "function": inner}


def stored_calls(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """With arguments as text: a table would give every call the fields of all others."""
    return [
        {**message, "tool_calls": [_stored(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _stored(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


# -- for templates that take less


def calls_as_text(messages: Sequence[Mapping[str, Any]], *, tool_role: bool) -> Messages:
    """Calls as part of the content; without `tool_role`, answers of tools as the user's."""
    written: Messages = []
    for message in messages:
        new = dict(message)
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in new.pop("tool_calls", [])
        ]
        if calls:
            new["content"] = "\n".join([new["content"], *calls] if new["content"] else calls)
        elif new["role"] == "tool" and not tool_role:
            new = {"role": "user", "content": answer_text(new["content"]), "tool_call_id": ""}
        written.append(new)
    return join_answers(written)


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Ids of nine characters; an answer without an id is to the first call that has none yet."""
    changed: Messages = []
    open_calls: list[str] = []
    made = 0
    for message in messages:
        new = dict(message)
        if new.get("tool_calls"):
            calls = []
            for call in new["tool_calls"]:
                made += 1
                calls.append({**call, "id": short_call_id(call.get("id") or f"call_{made}")})
            new["tool_calls"] = calls
            open_calls = [call["id"] for call in calls]
        elif new["role"] == "tool":
            given = new.get("tool_call_id")
            call_id = short_call_id(given) if given else next(iter(open_calls), short_call_id(""))
            open_calls = [each for each in open_calls if each != call_id]
            new["tool_call_id"] = call_id
        changed.append(new)
    return changed
