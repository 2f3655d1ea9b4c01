"""Conversations in the forms files have them, made into lists of messages.

Every command reads conversations through `read_messages`. What looks like a conversation and is none is refused with
its row; a value that does not look like one (a plain text, a number) is the caller's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.data.tool_messages import Messages, as_call_list
from verl.errors import DataError
from verl.json_input import check_nesting, parse_json

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
