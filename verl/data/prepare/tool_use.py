"""Conversations with tool calls, from the forms they are shared in, to one row for fine-tuning and for rewards.

`messages` and `tools` are what `verl sft` reads. `prompt` is all that comes before the first call, with the tools
described in a system message, and the truth is that call: `verl train` needs no tool that runs. `question` is the same
without the description, for runs with tools of their own (`rollout.multi_turn`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.data.messages import (
    SPEAKERS,
    Messages,
    as_tools,
    read_messages,
    read_turns,
    stored_calls,
    tools_text,
)
from verl.data.prepare.recipes import Row, Source, recipe, until_answer
from verl.data.tasks.base import rl_row
from verl.errors import DataError
from verl.json_input import parse_json

_CALL_ROLES = ("function_call", "tool_call")
_ROLES = {**SPEAKERS, **dict.fromkeys(_CALL_ROLES, "assistant")}
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
_TYPES |= dict.fromkeys(("list", "tuple", "set"), "array")
# Each takes time linear in the text: no white space that two parts of a pattern could share.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_SHOWN = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_SPEAKER = re.compile(r"^[^\S\n]*+(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
_QUOTED = re.compile(r"""("arguments"\s*:\s*)'(.*)'\s*}\s*\Z""", re.DOTALL)
_ROUTING = ("tools_kwargs", "interaction_kwargs", "agent_name", "environment")
"""Columns that `rollout.multi_turn` reads; kept where the source has them."""


def json_values(text: str) -> Iterator[Any]:
    """The JSON values that a text consists of, with space or commas between them."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        if text[position].isspace() or text[position] == ",":
            position += 1
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise DataError(f"a function that is not JSON ({error}): {text[position:][:100]!r}") from error
        yield value


def calls_of(text: str) -> list[Any]:
    """The calls in JSON text of one or of a list; DataError for other text."""
    quoted = _QUOTED.search(text)  # {"name": ..., "arguments": '{"city": "Rome"}'}
    try:
        if quoted:
            text = f"{text[: quoted.start()]}{quoted[1]}{quoted[2]}}}"
        value = parse_json(text)
    except ValueError as error:
        raise DataError(f"a call that is not JSON ({error}): {text[:100]!r}") from error
    return value if isinstance(value, list) else [value]


# -- the conversation


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """One message in the form of chat templates; its calls are not checked yet."""
    said = str(turn.get("role", turn.get("from"))).lower()
    if said not in _ROLES:
        raise DataError(f"unknown speaker {said!r}; known: {', '.join(_ROLES)}")
    role, text = _ROLES[said], turn.get("content", turn.get("value"))
    text = "" if text is None else text if isinstance(text, str) else json.dumps(text)
    kept = {name: turn[name] for name in ("name", "tool_call_id") if turn.get(name)}
    calls: Any = turn.get("tool_calls")
    if isinstance(calls, str):
        calls = calls_of(calls) if calls.strip() else None
    calls = [] if calls is None else list(calls)
    if turn.get("function_call"):
        calls.append(turn["function_call"])
    if said in _CALL_ROLES:
        calls, text = calls + calls_of(text), ""
    elif role == "assistant":
        calls += [call for written in _CALL.findall(text) for call in calls_of(written)]
        text = _CALL.sub("", text).strip()
    elif role == "tool":
        text = "\n".join(map(str.strip, _RESPONSE.findall(text))) or text
    return {"role": role, "content": text, **kept, **({"tool_calls": calls} if calls else {})}


def _dialogue(text: str) -> Messages:
    """The turns of a text with `USER:`, `ASSISTANT:`, `FUNCTION RESPONSE:` and `<functioncall>` (Glaive)."""
    parts = _SPEAKER.split(text)
    turns: Messages = []
    for who, said in zip(parts[1::2], parts[2::2], strict=True):
        said, _, call = said.replace("<|endoftext|>", "").strip().partition("<functioncall>")
        turn: dict[str, Any] = {"role": who.lower().replace(" ", "_"), "content": said.strip()}
        turns.append({**turn, **({"tool_calls": calls_of(call.strip())} if call.strip() else {})})
    return turns


def conversation(row: Mapping[str, Any]) -> Messages:
    """The messages of a row, whichever form it has."""
    columns = ("messages", "conversations", "conversation")
    given = next((row[name] for name in columns if row.get(name) is not None), None)
    turns: Any = read_turns(given, "the row")
    if turns is None and isinstance(row.get("chat"), str):
        turns = _dialogue(row["chat"])
    if turns is None and row.get("query") is not None and row.get("answers") is not None:
        answers = row["answers"]
        calls = calls_of(answers) if isinstance(answers, str) else list(answers)
        turns = [
            {"role": "user", "content": row["query"]},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
    if not turns:
        raise DataError(
            "no conversation: looked for messages, conversations, chat (Glaive) and query with answers (xLAM); "
            f"the columns are {', '.join(row)}"
        )
    return read_messages([_turn(turn) for turn in turns], "the conversation") or []


# -- the tools


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """With `parameters` as a JSON schema: some files only have {name: {"type": "str", "default": ...}}."""
    function = tool["function"]
    given = function.get("parameters") or {}
    bare = not {"type", "properties"} & given.keys() or isinstance(given.get("type"), Mapping)
    if given and bare and all(isinstance(each, Mapping) for each in given.values()):
        optional = {n for n, p in given.items() if "default" in p or "optional" in str(p.get("type"))}
        required = [name for name in given if name not in optional]
        properties = {name: {**each, "type": _type(each.get("type"))} for name, each in given.items()}
        given = {"type": "object", "properties": properties, "required": required}
    elif not given:
        given = {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": given}}


def _type(name: Any) -> str:
    """The JSON type of a Python type such as `List[int], optional`."""
    first = re.match(r"\w*", str(name).strip().lower())
    known = first[0] if first else ""
    return _TYPES.get(known, known if known in _TYPES.values() else "string")


def tools_of(row: Mapping[str, Any], system: str) -> list[dict[str, Any]]:
    """The tools of a row: a column, or a part of its system message."""
    given = row.get("tools") if row.get("tools") is not None else row.get("functions")
    shown = _SHOWN.search(system)
    if not given and shown:
        values = list(json_values(shown[1]))
        given = [tool for value in values for tool in (value if isinstance(value, list) else [value])]
    elif not given and row.get("chat") is not None and "{" in system:
        given = list(json_values(system[system.index("{") :]))
    return [_schema(tool) for tool in as_tools(given, "the row", "tools")]


# -- rows


def _described(question: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """The tools and how to call one in the system message."""
    before = question[0]["content"] if question[0]["role"] == "system" else ""
    text = "\n\n".join(filter(None, [before, tools_text(tools)]))
    return [{"role": "system", "content": text}, *(question[1:] if before else question)]


@recipe("conversations with tool calls (OpenAI, ShareGPT, Hermes, Glaive, xLAM), for fine-tuning and rewards")
def tool_use(row: Source, index: int, split: str) -> Row | None:
    messages = conversation(row)
    system = str(row.get("system") or "")
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] or system, messages[1:]
    tools = tools_of(row, system)
    # A system message that shows the tools is left out: the chat template, or `prompt`, shows them.
    if system and not (tools and (_SHOWN.search(system) or row.get("chat") is not None)):
        messages = [{"role": "system", "content": system}, *messages]
    messages = until_answer(messages)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not tools or not answers:
        return None
    first = next((number for number in answers if messages[number].get("tool_calls")), answers[0])
    question = messages[:first]
    if not question or question[-1]["role"] not in ("user", "tool"):
        return None
    functions = [call["function"] for call in messages[first].get("tool_calls", [])]
    truth = [{name: function[name] for name in ("name", "arguments")} for function in functions]
    extra = {"split": split, "index": index, "answer": messages[-1]["content"]}
    return {
        **rl_row("tool_use", "", json.dumps(truth), "tools", extra),
        "prompt": _described(question, tools),
        "question": question,
        "messages": stored_calls(messages),
        "tools": json.dumps(tools),
        **{name: row[name] for name in _ROUTING if row.get(name) is not None},
    }
