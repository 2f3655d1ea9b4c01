"""Conversations for fine-tuning, from the forms they are shared in, to one column `messages`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl.data.messages import after_prompt, named_roles, read_messages
from verl.data.prepare.base import Recipe, Row
from verl.data.tool_messages import Messages, stored_calls
from verl.errors import DataError

_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("input", "output"))


def turns_of(value: Any) -> Messages | None:
    """Messages with the usual roles; None for a value that is none."""
    messages = read_messages(value, "the row")
    return messages and named_roles(messages)


def with_system(row: Mapping[str, Any], messages: Messages) -> Messages:
    """With the column `system` in front, where the conversation has no such message."""
    if not row.get("system") or messages[0]["role"] == "system":
        return messages
    return [_message("system", row["system"]), *messages]


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
            before = turns_of(row[asked]) or [_message("user", row[asked])]
            answer = turns_of(row[answered]) or [_message("assistant", row[answered])]
            return [message for part in after_prompt(before, answer, "the row") for message in part]
    raise DataError(
        "no conversation: looked for messages, conversations, instruction/output, prompt/response and the like; "
        f"the columns are {', '.join(row)}"
    )


def convert(row: Mapping[str, Any], index: int, split: str) -> Row | None:
    messages = with_system(row, messages_of(row))
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]  # nothing answers what comes last
    if len(messages) < 2 or messages[0]["role"] == "assistant":
        return None
    tools = row.get("tools")
    if not tools:
        return {"messages": stored_calls(messages)}
    # As text: a table would give every schema the fields of all others.
    return {
        "messages": stored_calls(messages),
        "tools": tools if isinstance(tools, str) else json.dumps(list(tools)),
    }


RECIPE = Recipe(
    "sft_chat",
    "conversations (ShareGPT, Alpaca, messages, question and answer) to a column `messages`, with their `tools`",
    convert,
)
