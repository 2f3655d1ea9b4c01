"""`/v1/messages`, as Anthropic has it."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.conftest import ADD, MESSAGES, Running

TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]}
ASKED = [{"role": "user", "content": "Add"}]


def test_the_prompt_and_the_answer_are_those_of_chat(talker: Running) -> None:
    chat = talker.chat(
        messages=[{"role": "system", "content": "heard now"}, *MESSAGES], temperature=0, max_tokens=12
    )
    blocks = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    body: dict[str, Any] = {"system": "heard now", "messages": blocks}
    answer = talker.post("/v1/messages", **body, temperature=0, max_tokens=12).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    ends = {"stop": "end_turn", "length": "max_tokens"}
    assert answer["stop_reason"] == ends[chat["choices"][0]["finish_reason"]]
    counted = talker.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
    assert counted == answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_events_join_to_the_whole_message(caller: Running) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "3"}]
    body: dict[str, Any] = {"messages": begun, "tools": [TOOL], "temperature": 0, "max_tokens": 20}
    whole = caller.post("/v1/messages", **body).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["stop_reason"] == "tool_use" and whole["content"][1]["input"] == {"a": 1, "b": 2}
    events = [json.loads(each) for each in caller.events("/v1/messages", **body)]
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    assert "".join(each.get("text", "") for each in deltas) == whole["content"][0]["text"]
    written = "".join(each.get("partial_json", "") for each in deltas)
    assert json.loads(written) == whole["content"][1]["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_results_of_tools_are_read(caller: Running) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": 2}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "3"}]}
    history = [
        *ASKED,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Add"}]},
    ]
    counted = caller.post("/v1/messages/count_tokens", messages=history, tools=[TOOL]).json()
    call = {"id": "call_1", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    chat = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "user", "content": "Add"},
    ]
    prompt = caller.post("/tokenize", messages=chat, tools=[ADD]).json()
    assert counted["input_tokens"] == prompt["count"]


def test_a_stop_sequence_is_named(caller: Running) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "3"}]
    body: dict[str, Any] = {"messages": begun, "max_tokens": 9, "temperature": 0, "stop_sequences": ["first"]}
    answer = caller.post("/v1/messages", **body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "first")
    assert answer["content"][0]["text"].strip() == "spoke"


def test_what_cannot_be_served_is_refused_in_anthropics_form(talker: Running) -> None:
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for body, word in (
        ({"messages": MESSAGES}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 5, "container": "x"}, "container"),
        ({"messages": image, "max_tokens": 5}, "image"),
        (
            {"messages": MESSAGES, "max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools",
        ),
        ({"messages": MESSAGES, "max_tokens": 5, "thinking": {"type": "enabled"}}, "thinking"),
    ):
        answer = talker.post("/v1/messages", **body)
        told = answer.json()
        assert answer.status_code == 400 and told["type"] == "error", told
        assert told["error"]["type"] == "invalid_request_error" and word in told["error"]["message"]
    thread = talker.post("/v1/messages", messages=MESSAGES, max_tokens=5, thread={"type": "create"}).json()
    assert thread["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert (
        talker.client.post("/v1/messages", json={}, headers={"Authorization": ""}).json()["type"] == "error"
    )
