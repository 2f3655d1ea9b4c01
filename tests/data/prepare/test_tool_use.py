"""Conversations with tool calls: every form becomes the same row, which `verl sft` and the scorer of calls can use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.config.schema import SFTDataConfig
from verl.data.columns import truth_of
from verl.data.files import read_rows
from verl.data.offline_dataset import SFTDataset
from verl.data.prepare.cli import prepare
from verl.data.prepare.recipes import RECIPES
from verl.data.prepare.tool_use import tool_use as convert
from verl.errors import DataError
from verl.reward.scorers import get_scorer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
ASKED, ANSWERED = {"role": "user", "content": "Weather in Rome?"}, "It is sunny."
OPENAI = {
    "messages": [
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": ANSWERED},
    ],
    "tools": TOOLS,
}
FORMS = {
    "openai": OPENAI,
    "functions": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "function_call": {**CALL, "arguments": json.dumps(CALL["arguments"])},
            },
            {"role": "function", "name": "weather", "content": "sunny"},
            {"role": "assistant", "content": ANSWERED},
        ],
        "functions": [WEATHER],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": ASKED["content"]},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": ANSWERED},
        ],
        "tools": json.dumps([WEATHER]),
    },
    "hermes": {
        "conversations": [
            {
                "from": "system",
                "value": f"Call functions. <tools> {json.dumps(TOOLS[0])} </tools> Good luck.",
            },
            {"from": "human", "value": ASKED["content"]},
            {"from": "gpt", "value": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
            {"from": "tool", "value": "<tool_response>\nsunny\n</tool_response>"},
            {"from": "gpt", "value": ANSWERED},
        ]
    },
    "glaive": {
        "system": f"SYSTEM: You have these functions -\n{json.dumps(WEATHER, indent=1)}",
        "chat": f"USER: {ASKED['content']}\n\n\nASSISTANT: <functioncall> "
        '{"name": "weather", "arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
        f"FUNCTION RESPONSE: sunny\n\n\nASSISTANT: {ANSWERED} <|endoftext|>",
    },
}


def converted(source: dict[str, Any]) -> dict[str, Any]:
    row = convert(source, 7, "train")
    assert row is not None
    return row


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_row(form: str) -> None:
    row = converted(FORMS[form])
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("user", ASKED["content"]),
        ("assistant", ""),
        ("tool", "sunny"),
        ("assistant", ANSWERED),
    ]
    (call,) = row["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert json.loads(row["tools"]) == TOOLS
    assert row["question"] == [ASKED] and json.loads(truth_of(row)) == [CALL]
    system, asked = row["prompt"]
    assert asked == ASKED and json.dumps(TOOLS[0]) in system["content"] and "<tool_call>" in system["content"]
    assert row["extra_info"] == {"split": "train", "index": 7, "answer": ANSWERED}


def test_a_query_with_calls_as_its_answer() -> None:
    """Types are those of Python in xLAM's files, and there is no `required`."""
    bare = {
        "name": "weather",
        "description": "",
        "parameters": {"city": {"type": "str"}, "days": {"type": "List[int], optional"}},
    }
    row = converted({"query": "Rome?", "answers": json.dumps([CALL, CALL]), "tools": json.dumps([bare])})
    assert len(row["messages"][1]["tool_calls"]) == 2 and json.loads(truth_of(row)) == [CALL, CALL]
    (schema,) = json.loads(row["tools"])
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
        "required": ["city"],
    }


def test_a_parameter_may_be_called_type() -> None:
    bare = {"name": "find", "parameters": {"type": {"type": "str", "default": "a"}}}
    row = converted({"query": "q", "answers": [{"name": "find", "arguments": {}}], "tools": [bare]})
    parameters = json.loads(row["tools"])[0]["function"]["parameters"]
    assert parameters["properties"]["type"] == {"type": "string", "default": "a"}
    assert parameters["required"] == []


def test_a_conversation_without_a_call_expects_none() -> None:
    row = converted({"messages": [ASKED, {"role": "assistant", "content": "I cannot."}], "tools": TOOLS})
    assert truth_of(row) == "[]" and row["question"] == [ASKED]


def test_what_comes_before_the_first_call_is_the_prompt() -> None:
    before = [
        {"role": "system", "content": "Be kind."},
        ASKED,
        {"role": "assistant", "content": "Which Rome?"},
        ASKED,
    ]
    row = converted({"messages": [*before, *OPENAI["messages"][1:]], "tools": TOOLS})
    assert row["question"] == before
    assert row["prompt"][0]["content"].startswith("Be kind.\n\n") and row["prompt"][1:] == before[1:]


def test_columns_of_agents_are_kept() -> None:
    kwargs = {"weather": {"create_kwargs": {"seed": 1}}}
    row = converted({**OPENAI, "tools_kwargs": kwargs, "agent_name": "tool_agent"})
    assert row["tools_kwargs"] == kwargs and row["agent_name"] == "tool_agent"
    assert "environment" not in row


@pytest.mark.parametrize(
    "source",
    [
        {"messages": [ASKED, {"role": "assistant", "content": "x"}]},  # no tools
        {"messages": [ASKED], "tools": TOOLS},  # no answer
        {"messages": OPENAI["messages"][1:], "tools": TOOLS},  # begins with the assistant
    ],
)
def test_rows_that_teach_no_call_are_left_out(source: dict[str, Any]) -> None:
    assert convert(source, 0, "train") is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"text": "x"}, "no conversation.*the columns are text"),
        ({"messages": [{"role": "narrator", "content": "x"}], "tools": TOOLS}, "unknown speaker 'narrator'"),
        ({"query": "q", "answers": "weather(Rome)", "tools": TOOLS}, "a call that is not JSON"),
        (
            {"query": "q", "answers": [{"arguments": {}}], "tools": TOOLS},
            "has no function with a name",
        ),
        ({"messages": OPENAI["messages"], "tools": "weather"}, "must be a list of JSON schemas"),
        ({**FORMS["glaive"], "system": "SYSTEM: {'name': 'weather'}"}, "a function that is not JSON"),
    ],
)
def test_rows_that_cannot_be_read_are_named(source: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(source, 0, "train")


def test_the_files_are_read_by_fine_tuning(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Rows with different tools in one parquet file; what is learned are the calls and the answer."""
    other = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    second = {
        "query": "Now?",
        "answers": [{"name": "time", "arguments": {"zone": 1, "city": None}}],
        "tools": [other],
    }
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (OPENAI, second)))
    (written,) = prepare(RECIPES["tool_use"], [str(tmp_path / "train.jsonl")], tmp_path / "out")
    rows = read_rows(written.path)
    assert len(rows) == 2 and json.loads(truth_of(rows[1])) == [{"name": "time", "arguments": {"zone": 1}}]
    dataset = SFTDataset(SFTDataConfig(max_length=1024), rows, tiny_tokenizer)
    assert len(dataset) == 2 and all(item.response_mask.any() for item in dataset.items)


# -- the scorer


def called(*calls: Any) -> str:
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


OTHER = {"name": "weather", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize(
    ("response", "truth", "score", "names"),
    [
        (called(CALL), [CALL], 1.0, 1.0),
        ("Let me see. " + called(OTHER, CALL), [CALL, OTHER], 1.0, 1.0),
        (called(OTHER), [CALL], 0.0, 1.0),
        (called(CALL, OTHER), [CALL], 0.5, 0.5),
        (called(CALL), [CALL, OTHER], 0.5, 0.5),
        (called(CALL, CALL), [CALL, OTHER], 0.5, 1.0),
        (called({**CALL, "arguments": json.dumps(CALL["arguments"])}), [CALL], 1.0, 1.0),
        (called({"name": "f", "arguments": {"b": 1, "a": 2}}),
         [{"name": "f", "arguments": {"a": 2, "b": 1}}], 1.0, 1.0),
        ("<tool_call>" + json.dumps(CALL), [CALL], 1.0, 1.0),
        ("<tool_call>{</tool_call>", [CALL], 0.0, 0.0),
        ("<tool_call>[1]</tool_call>", [], 0.0, 0.0),
        (f"<think>{called(CALL)}</think>It is sunny.", [CALL], 0.0, 0.0),
        ("It is sunny.", [CALL], 0.0, 0.0),
        ("I cannot.", [], 1.0, 1.0),
        (called(CALL), [], 0.0, 0.0),
    ],
)  # fmt: skip
def test_calls_are_compared_with_those_expected(
    response: str, truth: list[Any], score: float, names: float
) -> None:
    result = get_scorer("tool_use")(response, json.dumps(truth))
    assert (result["score"], result["names"]) == (score, names)
    assert result["acc"] == float(score == 1.0)


def test_a_truth_that_is_no_list_of_calls_is_refused() -> None:
    from verl.errors import RewardError

    for truth in ("sunny", '[{"arguments": {}}]', "[1]", None):
        with pytest.raises(RewardError, match="cannot use the ground truth"):
            get_scorer("tool_use")("x", truth)
