"""Conversations for fine-tuning, from the forms they are shared in, to one column `messages`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.chat import Messages, as_messages
from verl.data.prepare.base import Recipe, Row
from verl.errors import DataError

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("input", "output"))


def turns_of(value: Any) -> Messages | None:
    """Messages from `role`/`content` or `from`/`value` pairs; None when it is neither."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    turns: Messages = []
    for turn in value:
        if not isinstance(turn, Mapping):
            return None
        role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role is None:
            return None
        if str(role).lower() not in _ROLES:
            raise DataError(f"unknown speaker {role!r}; known: {', '.join(sorted(_ROLES))}")
        kept = {
            name: part
            for name, part in turn.items()
            if name in ("tool_calls", "name", "tool_call_id") and part
        }
        turns.append({"role": _ROLES[str(role).lower()], "content": "" if text is None else text, **kept})
    return turns


def _message(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": str(text)}


def messages_of(row: Mapping[str, Any]) -> Messages:
    """The conversation of a row, whichever form it has."""
    for column in ("messages", "conversations", "conversation"):
        turns = turns_of(row.get(column))
        if turns:
            return turns
    if row.get("instruction") is not None and row.get("output") is not None:
        question = str(row["instruction"]) + (f"\n\n{row['input']}" if row.get("input") else "")
        return [_message("user", question), _message("assistant", row["output"])]
    for asked, answered in _PAIRS:
        if row.get(asked) is not None and row.get(answered) is not None:
            before = as_messages(row[asked]) or [_message("user", row[asked])]
            return [*before, _message("assistant", row[answered])]
    raise DataError(
        "no conversation: looked for messages, conversations, instruction/output, prompt/response and the like; "
        f"the columns are {', '.join(row)}"
    )


def convert(row: Mapping[str, Any], index: int, split: str) -> Row | None:
    messages = messages_of(row)
    if row.get("system") and messages[0]["role"] != "system":
        messages = [_message("system", row["system"]), *messages]
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]  # nothing answers what comes last
    if len(messages) < 2 or messages[0]["role"] == "assistant":
        return None
    tools = row.get("tools")
    if not tools:
        return {"messages": messages}
    # As text: a table would give every schema the fields of all others.
    return {"messages": messages, "tools": tools if isinstance(tools, str) else json.dumps(list(tools))}


RECIPE = Recipe(
    "sft_chat",
    "conversations (ShareGPT, Alpaca, messages, question and answer) to a column `messages`, with their `tools`",
    convert,
)
