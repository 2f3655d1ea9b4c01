"""Conversations in the forms files have them, made into lists of messages.

Every command reads conversations through `read_messages`. What looks like a conversation and is none is refused with
its row; a value that does not look like one (a plain text, a number) is the caller's. Tools, tool calls and their
answers are made into what chat templates take: one that does not write `tool_calls` gets them as text, in the form that
`tools_text` describes to the model.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.errors import DataError
from verl.json_input import check_nesting, parse_json

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
    read = _json_value(value)
    if read is None or (isinstance(value, str) and not value.strip()):
        return []
    tools: list[Any] = [_json_value(each) for each in read] if isinstance(read, list) else [None]
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else None for tool in tools]
    if not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in functions):
        raise DataError(
            f"The tools of {where} ({key}) must be a list of JSON schemas of functions, or JSON text of one, "
            f"got {str(value)[:200]!r}. To leave the column out, set {key}=none."
        )
    return [_filled(tool) if "function" in tool else _wrapped(tool) for tool in tools]


def as_call_list(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The calls of a message, each as `{"function": {"name", "arguments"}}` with arguments as a mapping: templates turn
    them into text themselves."""
    calls = _json_value(value)
    if calls is not None and not isinstance(calls, list):
        raise DataError(f"'tool_calls' of {where} must be a list, got {str(calls)[:200]!r}.")
    if calls and role != "assistant":
        raise DataError(f"{where} has 'tool_calls', but its role is {role!r}: only 'assistant' may.")
    return [_call(_json_value(call), where) for call in calls or ()]


def _call(value: Any, where: str) -> dict[str, Any]:
    call = _wrapped(value) if isinstance(value, Mapping) and "function" not in value else value
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"A call in 'tool_calls' of {where} has no function with a name: {str(value)[:200]!r}."
        )
    given = function.get("arguments")
    arguments = _json_value(given) if given not in (None, "") else {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"'arguments' of the call of {function['name']!r} in {where} must be a mapping or JSON text of one, "
            f"got {str(given)[:200]!r}."
        )
    if not isinstance(given, str):
        arguments = _filled(arguments)
    rest = {name: value for name, value in call.items() if value is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def _json_value(value: Any) -> Any:
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


def _wrapped(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function without the outer layer; an id belongs to that."""
    inner = {name: value for name, value in _filled(function).items() if name not in ("id", "type")}
    outer = {"id": function["id"]} if function.get("id") else {}
    return {"type": "function", **outer, "function": inner}


def stored_calls(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """With arguments as text: a table would give every call the fields of all others."""
    stored: Messages = []
    for message in map(dict, messages):
        if "tool_calls" in message:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        stored.append(message)
    return stored


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


_TEXT = re.compile(r"""\s*(\[\s*)?\{\s*["']\w{1,40}["']\s*:""")
"""How the text of a list of mappings, or of one, begins."""
_KEY = re.compile(r"""["'](role|content|tool_calls|from|value)["']\s*:""")
_NUMPY_BREAK = re.compile(r"\}[^\S\n]*\n\s*\{")
"""Between the elements of an array that numpy wrote. Inside of a text such a line break is written as an escape."""
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
}
"""Names of roles in files, and the usual one."""
_TEXT_PARTS = ("text", "input_text", "output_text")


def is_conversation(value: Any) -> bool:
    """Whether a value looks like messages: some that cannot be read do."""
    if isinstance(value, str):
        found = _TEXT.match(value)
        return found is not None and _names_messages(value) and (found[1] is not None or _one_message(value))
    if isinstance(value, Mapping):
        return isinstance(value.get("role"), str) and not {"content", "tool_calls"}.isdisjoint(value)
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        return False
    return isinstance(value[0], Mapping) and isinstance(value[0].get("role", value[0].get("from")), str)


def _names_messages(text: str) -> bool:
    """Whether a text has the keys of messages, in quotes."""
    keys = set(_KEY.findall(text))
    return ("role" in keys and not keys.isdisjoint(("content", "tool_calls"))) or {"from", "value"} <= keys


def _one_message(text: str) -> bool:
    """Whether the text of a mapping is that of a message: answers are JSON objects of other kinds, too."""
    try:
        value = parse_json(text)
    except ValueError:
        return False
    return is_conversation(value) and value["role"].lower() in SPEAKERS


def read_messages(value: Any, where: str) -> Messages | None:
    """The messages of a value: a list of mappings with `role` and `content` or with `from` and `value` (ShareGPT), one
    such mapping, or JSON or Python text of these; None for what does not look like any of them.

    Fields that are None, as table formats fill them in, are left out. Contents in parts are joined, arguments of calls
    are mappings. DataError names `where` and the message."""
    turns = read_turns(value, where)
    return (
        None if turns is None else [_message(turn, f"message {n} of {where}") for n, turn in enumerate(turns)]
    )


def read_turns(value: Any, where: str) -> list[Mapping[str, Any]] | None:
    """The mappings of a conversation as they are written; None for what does not look like one."""
    if not is_conversation(value):
        return None
    turns = _parsed(value, where) if isinstance(value, str) else value
    turns = [turns] if isinstance(turns, Mapping) else list(turns)
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise DataError(
                f"Message {number} of {where} is a {type(turn).__name__}, not a mapping with 'role' and 'content': "
                f"{str(turn)[:100]!r}."
            )
    return turns


def _parsed(text: str, where: str) -> Any:
    """The value of JSON text, or of Python text as pandas and numpy write it into csv files."""
    try:
        return parse_json(text)
    except ValueError as error:
        reason = str(error)
    for candidate in (text, _NUMPY_BREAK.sub("}, {", text)):
        try:
            value = ast.literal_eval(candidate.strip())
            check_nesting(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, list | dict):
            return value
    raise DataError(
        f"{where} looks like messages, but is neither JSON ({reason}) nor the Python text of a list: {text[:100]!r}. "
        "Repair the row, or store messages as a list."
    )


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    kept = {str(name): part for name, part in turn.items() if part is not None}
    if "role" not in kept and "from" in kept:
        speaker = str(kept.pop("from"))
        if speaker.lower() not in SPEAKERS:
            raise DataError(f"{where} is of an unknown speaker {speaker!r}; known: {', '.join(SPEAKERS)}.")
        kept = {"role": SPEAKERS[speaker.lower()], "content": kept.pop("value", ""), **kept}
    if not isinstance(kept.get("role"), str):
        raise DataError(f"{where} has no 'role', or one that is no text: {str(dict(turn))[:200]!r}.")
    calls = as_call_list(kept.pop("tool_calls", None), kept["role"], where)
    if "content" not in kept and not calls and "tool_calls" not in turn:
        raise DataError(f"{where} has neither 'content' nor 'tool_calls': {str(dict(turn))[:200]!r}.")
    kept["content"] = _text(kept.get("content", ""), where)
    if calls:
        kept["tool_calls"] = calls
    return kept


def _text(content: Any, where: str) -> str:
    """The text of a content, joined where it comes in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple | np.ndarray):
        raise DataError(
            f"The content of {where} must be a text or a list of parts, got {type(content).__name__}: "
            f"{str(content)[:100]!r}."
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise DataError(
                f"The content of {where} has a part of type {kind!r}: only parts with text can be used."
            )
        texts.append(part["text"])
    return "".join(texts)


def named_roles(messages: Messages) -> Messages:
    """With the usual name of each role (`human` is `user`, `gpt` is `assistant`); DataError for one without."""
    for message in messages:
        if message["role"].lower() not in SPEAKERS:
            raise DataError(f"unknown speaker {message['role']!r}; known: {', '.join(SPEAKERS)}")
    return [{**message, "role": SPEAKERS[message["role"].lower()]} for message in messages]


def no_prompt(prompt: Any, where: str) -> DataError:
    """The error of a prompt that is neither text nor messages."""
    return DataError(
        f"The prompt of {where} is neither a string nor a list of messages with 'role' and 'content': "
        f"{str(prompt)[:200]!r}. Is it the right column (data.prompt_key)?"
    )


def after_prompt(prompt: Messages, answer: Messages, where: str) -> tuple[Messages, Messages]:
    """What comes before an answer, and the answer's own messages. The answer may be a whole conversation in which the
    prompt is, with or without its system message."""
    if answer[0]["role"] not in ("system", "developer", "user"):
        return prompt, answer
    told, asked = _system_apart(prompt)
    also_told, following = _system_apart(answer)
    said, wanted = ([(m["role"], m["content"].strip()) for m in part] for part in (following, asked))
    ends = [at for at in range(len(asked), len(following)) if asked and said[at - len(asked) : at] == wanted]
    if ends and (not told or not also_told or told[0]["content"].strip() == also_told[0]["content"].strip()):
        return [*(told or also_told), *following[: ends[0]]], following[ends[0] :]
    if also_told or (asked[-1:] and asked[-1]["role"] != "assistant"):
        raise DataError(
            f"{where} is a conversation in which the prompt is not: it begins with "
            f"{answer[0]['content'][:60]!r}, the prompt ends with {prompt[-1]['content'][-60:]!r}. Give the answer "
            "alone, or leave the prompt out."
        )
    return prompt, answer


def shared_beginning(chosen: Messages, rejected: Messages, where: str) -> Messages:
    """The messages that two conversations both start with. The last of each is an answer."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and chosen[shared - 1]["role"] == chosen[shared]["role"] == "assistant":
        shared -= 1  # a prompt that ends with the assistant would be continued
    if not shared:
        raise DataError(f"The two conversations of {where} do not start with the same message.")
    return chosen[:shared]


def _system_apart(messages: Messages) -> tuple[Messages, Messages]:
    system = messages[:1] if messages and messages[0]["role"] in ("system", "developer") else []
    return system, messages[len(system) :]


def plain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The contents, joined by newlines, without any template."""
    return "\n".join(str(message.get("content") or "") for message in messages)
