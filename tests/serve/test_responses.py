"""`/v1/responses`, as OpenAI has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import ADD, CALL, MESSAGES, Running

ROUTE = "/v1/responses"
TOOL = {"type": "function", **ADD["function"], "strict": True}


def test_the_prompt_and_the_answer_are_those_of_chat(talker: Running) -> None:
    system = {"role": "system", "content": "heard now"}
    chat = talker.chat(messages=[system, *MESSAGES], temperature=0, max_tokens=12, logprobs=True)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": MESSAGES[0]["content"]}]}]
    body: dict[str, Any] = {"instructions": "heard now", "temperature": 0, "max_output_tokens": 12}
    body["include"] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    answer = talker.post(ROUTE, input=parts, **body).json()
    (choice,), (item,) = chat["choices"], answer["output"]
    assert item["content"][0]["text"] == choice["message"]["content"]
    assert item["content"][0]["logprobs"] == choice["logprobs"]["content"]
    ends = {"stop": ("completed", None), "length": ("incomplete", {"reason": "max_output_tokens"})}
    assert (answer["status"], answer["incomplete_details"]) == ends[choice["finish_reason"]]
    assert item["status"] == answer["status"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert answer["temperature"] == 0 and answer["top_p"] == 1 and answer["instructions"] == "heard now"
    drawn = {**body, "temperature": 1, "seed": 7}
    twice = [talker.post(ROUTE, input=parts, **drawn).json()["output"][0]["content"] for _ in range(2)]
    alike = {"temperature": 1, "seed": 7, "max_tokens": 12, "logprobs": True}
    (choice,) = talker.chat(messages=[system, *MESSAGES], **alike)["choices"]
    assert [content[0]["text"] for content in twice] == [choice["message"]["content"]] * 2
    as_text = talker.post(ROUTE, input=MESSAGES[0]["content"], **body).json()
    assert as_text["output"][0]["content"] == item["content"]
    assert as_text["id"] != answer["id"]


def test_calls_and_their_results_are_read_back(caller: Running) -> None:
    """A history of items is the prompt of the same history in chat."""
    asked = {"type": "message", "role": "user", "content": "Add"}
    body: dict[str, Any] = {"tools": [TOOL], "temperature": 0, "max_output_tokens": 20}
    first = caller.post(ROUTE, input=[asked], **body).json()
    (call,) = first["output"]
    assert call["type"] == "function_call" and json.loads(call["arguments"]) == {"a": 1, "b": 2}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    history = [asked, {"role": "assistant", "content": "first"}, call, result]
    second = caller.post(ROUTE, input=[*history, asked], **body).json()
    written = {
        "id": call["call_id"],
        "type": "function",
        "function": {"name": "add", "arguments": call["arguments"]},
    }
    chat = caller.chat(
        messages=[
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": "first", "tool_calls": [written]},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "3"},
            {"role": "user", "content": "Add"},
        ],
        tools=[ADD],
        temperature=0,
        max_tokens=20,
    )
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_an_answer_without_text_is_an_empty_message(caller: Running) -> None:
    """Its first token ends it."""
    items = [{"role": "user", "content": "Add"}, {"role": "assistant", "content": CALL}]
    body: dict[str, Any] = {"input": items, "temperature": 0, "max_output_tokens": 20}
    (item,) = caller.post(ROUTE, **body).json()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
    kinds = [json.loads(each)["type"] for each in caller.events(ROUTE, **body)]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_events_build_up_the_whole_answer(caller: Running, tools: list[Any]) -> None:
    items = [{"role": "user", "content": "Add"}, {"role": "assistant", "content": "3"}]
    body: dict[str, Any] = {"input": items, "tools": tools, "temperature": 0, "max_output_tokens": 20}
    whole = caller.post(ROUTE, **body).json()
    assert [item["type"] for item in whole["output"]] == ["message", *(["function_call"] if tools else [])]
    events = [json.loads(each) for each in caller.events(ROUTE, **body)]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    built: list[dict[str, Any]] = []
    for kind, each in zip(kinds, events, strict=True):
        if kind == "output_item.added":
            built.append(each["item"])
        elif kind == "content_part.added":
            built[each["output_index"]]["content"].append(each["part"])
        elif kind == "output_text.delta":
            built[each["output_index"]]["content"][0]["text"] += each["delta"]
        elif kind == "function_call_arguments.delta":
            built[each["output_index"]]["arguments"] += each["delta"]
        elif kind == "output_item.done":
            assert built[each["output_index"]] | {"status": "completed"} == each["item"]
    strip = ("id", "call_id", "status")
    bare = [
        [{k: v for k, v in item.items() if k not in strip} for item in found]
        for found in (built, whole["output"])
    ]
    assert bare[0] == bare[1]
    assert events[-1]["response"]["usage"] == whole["usage"]
    assert len(events[-1]["response"]["output"]) == len(built)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": "a", "previous_response_id": "resp_1"}, "send the whole history"),
        ({"input": "a", "reasoning": {"effort": "low"}}, "'reasoning' is not supported"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}}, "'format' is not supported"),
        ({"input": "a", "include": ["file_search_call.results"]}, "'include' is not supported"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "only functions"),
        ({"input": "a", "max_tool_calls": 1}, "'max_tool_calls' is not supported"),
        ({"input": []}, "'input' must be"),
        ({}, "'input' must be"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0: an item of type 'reasoning'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image' is not supported"),
        ({"input": [3]}, "input.0: an item of type None"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(talker: Running, body: dict[str, Any], named: str) -> None:
    answer = talker.post(ROUTE, **body)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text
