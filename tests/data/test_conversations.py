"""What is learned of conversations, decoded, against what each family's model writes."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.chat_tokenizers import FAMILIES, chat_tokenizer
from verl.config.schema import SFTDataConfig
from verl.data.files import Rows
from verl.data.messages import PROBE_TOOL
from verl.data.offline_dataset import SFTDataset
from verl.errors import DataError

Message = dict[str, Any]
END = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>"}
TRIMS = ("llama3", "gemma", "mistral")
TEXT_CALLS = ("gemma", "smollm2")
QUESTION: Message = {"role": "user", "content": "How many?"}
tokenizer_of = cache(chat_tokenizer)


def build(family: str, *rows: dict[str, Any], **changes: Any) -> SFTDataset:
    config = SFTDataConfig(**{"train_files": ["unused"], "max_length": 100_000, **changes})
    return SFTDataset(config, Rows.from_list(rows), tokenizer_of(family))


def learned_parts(dataset: SFTDataset) -> list[tuple[str, str]]:
    """Each run of learned tokens, with the text of its row before it, in order."""
    found = []
    for position in range(len(dataset)):
        item = dataset[position]
        ids, mask = item.input_ids.tolist(), item.response_mask.tolist()
        starts = [at for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]
        for start in starts:
            end = next((at for at in range(start, len(mask)) if not mask[at]), len(mask))
            found.append((dataset.tokenizer.decode(ids[:start]), dataset.tokenizer.decode(ids[start:end])))
    return found


def assistant(content: str | None = None, *arguments: Any, **more: Any) -> Message:
    """An answer; with arguments, calls of the tool."""
    calls = [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": "lookup", "arguments": {"word": word}},
        }
        for number, word in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **more}


def tool(content: str, number: int = 0) -> Message:
    return {"role": "tool", "name": "lookup", "tool_call_id": f"call{number:05d}", "content": content}


def written(family: str, message: Message) -> str:
    """What the model of this family writes for a message, its end included."""
    content, end = message["content"] or "", END.get(family, "<|im_end|>")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    data = [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]
    tagged = [f'<tool_call>\n{{"name": "lookup", "arguments": {each}}}\n</tool_call>' for each in data]
    if calls and family == "llama3":
        return f'{{"name": "lookup", "parameters": {data[0]}}}{end}'
    if calls and family == "mistral":
        listed = [f'{{"name": "lookup", "arguments": {d}, "id": "call{n:05d}"}}' for n, d in enumerate(data)]
        return f"[TOOL_CALLS] [{', '.join(listed)}]{end}"
    if family == "qwen3":
        thinking, _, rest = content.rpartition("</think>")
        thinking = thinking.removeprefix("<think>").strip("\n")
        rest = rest.lstrip("\n")
        separator = "\n" if rest and tagged else ""
        return f"<think>\n{thinking}\n</think>\n\n{rest}{separator}" + "\n".join(tagged) + end
    text = "\n".join([content, *tagged] if content else tagged)
    return (" " if family == "mistral" else "") + (text.strip() if family in TRIMS else text) + end


def context(family: str, messages: list[Message], tools: list[Any]) -> str:
    """What the engine would show the model before the answer that follows these messages."""
    return tokenizer_of(family).apply_chat_template(
        [{**message, "content": message["content"] or ""} for message in messages],
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"qwen3"}))
def test_an_empty_answer_among_others_is_counted(family: str, caplog: pytest.LogCaptureFixture) -> None:
    messages = [QUESTION, assistant("3"), QUESTION, assistant("4")]
    build(family, {"messages": messages})
    assert "empty answer" not in caplog.text
    build(family, {"messages": [*messages[:3], assistant("")]}, {"messages": messages})
    assert "1 of 2 rows have an empty answer" in caplog.text


words = st.text('ab é\n"{', max_size=8)
spoken = words.map(lambda text: f"s{text}")
thoughts = st.text("ab", min_size=1, max_size=4).map(lambda text: f"<think>\n{text}\n</think>\n\n")


@st.composite
def conversations(draw: st.DrawFn, family: str) -> tuple[list[Message], list[Any]]:
    tools = draw(st.booleans())
    messages: list[Message] = []
    if family != "gemma" and draw(st.booleans()):
        messages.append({"role": "system", "content": f"SYSTEM{draw(words)}"})
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": f"USER{turn}{draw(words)}"})
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            arguments = draw(st.lists(words, min_size=1, max_size=1 if family == "llama3" else 2))
            # Llama 3 and Mistral write calls alone.
            content = draw(st.none() | st.just("") | spoken) if family not in ("llama3", "mistral") else None
            messages.append(assistant(content, *arguments))
            messages += [tool(f"FOUND{draw(words)}", number) for number in range(len(arguments))]
        thought = draw(st.just("") | thoughts) if family == "qwen3" else ""
        messages.append(assistant(thought + draw(spoken)))
    return messages, [PROBE_TOOL] if tools else []


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_answer_is_learned_once_and_nothing_else(family: str, data: st.DataObject) -> None:
    messages, tools = data.draw(conversations(family))
    parts = learned_parts(build(family, {"messages": messages, "tools": tools}))
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert [text for _, text in parts] == [written(family, messages[number]) for number in answers]
    for (before, text), number in zip(parts, answers, strict=True):
        assert not any(role in text for role in ("USER", "SYSTEM", "FOUND"))
        if not (tools and family in TEXT_CALLS):
            assert before == context(family, messages[:number], tools)


@pytest.mark.parametrize("family", TEXT_CALLS)
def test_calls_as_text_where_the_template_writes_none(family: str) -> None:
    messages = [QUESTION, assistant(None, "x", "y"), tool("1"), tool("2", 1), assistant("Two.")]
    (first, _), (second, _) = learned_parts(build(family, {"messages": messages, "tools": [PROBE_TOOL]}))
    assert "<tools>" in first and json.dumps(PROBE_TOOL) in first
    answers = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert f"user\n{answers}" in second


@pytest.mark.parametrize(("family", "rows"), [("qwen2_5", 1), ("llama3", 1), ("gemma", 1), ("qwen3", 3)])
def test_a_conversation_is_one_row_while_its_beginning_stays(family: str, rows: int) -> None:
    messages = [QUESTION, assistant("a"), QUESTION, assistant("b"), QUESTION, assistant("c")]
    assert len(build(family, {"messages": messages})) == rows


def test_thinking_is_learned_and_seen_only_where_the_template_keeps_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def thought(number: int, *calls: str) -> Message:
        return assistant(f"<think>\nWhy {number}.\n</think>\n\nSo {number}.", *calls)

    messages = [QUESTION, thought(0), QUESTION, thought(1, "x"), tool("1"), thought(2)]
    with caplog.at_level(logging.INFO):
        dataset = build("qwen3", {"messages": messages, "tools": [PROBE_TOOL]}, {"messages": messages[:2]})
    assert "1 of 2 conversations are 2 rows" in caplog.text and "thinking" in caplog.text
    texts = [dataset.tokenizer.decode(dataset[position].input_ids) for position in range(3)]
    assert "Why 0" in texts[0] and "Why 1" not in texts[0]
    assert "So 0" in texts[1] and "Why 0" not in texts[1] and "Why 1" in texts[1] and "Why 2" in texts[1]
    learned = [text for _, text in learned_parts(dataset)]
    assert [text.partition("\n</think>")[0] for text in learned] == [
        f"<think>\nWhy {number}." for number in (0, 1, 2, 0)
    ]


def test_no_thinking_asked_for_is_context() -> None:
    changes = {"apply_chat_template_kwargs": {"enable_thinking": False}}
    parts = learned_parts(build("qwen3", {"messages": [QUESTION, assistant("Five.")]}, **changes))
    assert [text for _, text in parts] == ["Five.<|im_end|>"]
    assert parts[0][0].endswith("<think>\n\n</think>\n\n")


def test_several_answers_in_a_row_are_turns_of_their_own() -> None:
    messages = [QUESTION, assistant("a"), assistant("b")]
    (_, first), (before, second) = learned_parts(build("qwen2_5", {"messages": messages}))
    assert (first, second) == ("a<|im_end|>", "b<|im_end|>")
    assert before.endswith("a<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(DataError, match=r"refuses row 0 of .*, message 2: .*alternate"):
        build("gemma", {"messages": messages})


# -- forms of tools and calls


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps([PROBE_TOOL]),
        [json.dumps(PROBE_TOOL)],
        [PROBE_TOOL["function"]],
        [{**PROBE_TOOL, "strict": None}],
        (PROBE_TOOL,),
    ],
)
def test_forms_of_tools(tools: Any) -> None:
    row = {"messages": [QUESTION, assistant("Five.")]}
    given, wanted = (build("qwen2_5", {**row, "tools": each})[0] for each in (tools, [PROBE_TOOL]))
    assert given.input_ids.tolist() == wanted.input_ids.tolist()
    assert '"lookup"' in tokenizer_of("qwen2_5").decode(given.input_ids)


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools(tools: Any) -> None:
    row = {"messages": [QUESTION, assistant("Five.")]}
    with_key, without = build("qwen2_5", {**row, "tools": tools}), build("qwen2_5", row)
    assert with_key[0].input_ids.tolist() == without[0].input_ids.tolist()


def test_tools_of_a_prompt_with_a_response_and_under_another_name() -> None:
    row = {"prompt": [QUESTION], "response": "Five.", "functions": [PROBE_TOOL]}
    ((before, learned),) = learned_parts(build("qwen2_5", row, tools_key="functions"))
    assert before == context("qwen2_5", [QUESTION], [PROBE_TOOL]) and learned == "Five.<|im_end|>"
    assert "lookup" not in learned_parts(build("qwen2_5", row))[0][0]
    with pytest.raises(DataError, match=r"no column 'function' \(data.tools_key\)"):
        build("qwen2_5", row, tools_key="function")


@pytest.mark.parametrize(
    "calls",
    [
        [{"function": {"name": "lookup", "arguments": '{"word": "x"}'}}],
        [{"function": {"name": "lookup", "arguments": {"word": "x", "other": None}}, "id": None}],
        [{"name": "lookup", "arguments": {"word": "x"}}],
        '[{"name": "lookup", "arguments": {"word": "x"}}]',
    ],
)
def test_forms_of_calls(calls: Any) -> None:
    messages = [QUESTION, {"role": "assistant", "tool_calls": calls}]
    wanted = [QUESTION, assistant("", "x")]
    parts = learned_parts(build("qwen2_5", {"messages": messages}))
    assert parts == learned_parts(build("qwen2_5", {"messages": wanted}))
    assert '"arguments": {"word": "x"}}' in parts[0][1]


def test_fields_that_a_table_fills_in_are_left_out(tmp_path: Path) -> None:
    other = {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"n": {"type": "x"}}}},
    }
    add = {"function": {"name": "add", "arguments": {"n": 1}}}
    rows = [
        {"messages": [QUESTION, assistant(None, "x"), tool("1"), assistant("One.")], "tools": [PROBE_TOOL]},
        {"messages": [QUESTION, assistant("", tool_calls=[add])], "tools": [PROBE_TOOL, other]},
    ]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    config = SFTDataConfig(train_files=[str(file)], max_length=10_000, shuffle=False)
    table = SFTDataset(config, [str(file)], tokenizer_of("qwen2_5"))
    texts = [
        [table.tokenizer.decode(item.input_ids) for item in each] for each in (table, build("qwen2_5", *rows))
    ]
    # A table has one order of fields for all rows.
    assert [sorted(text) for text in texts[0]] == [sorted(text) for text in texts[1]]
    assert '{"word": "x"}' in texts[0][0] and '{"n": 1}' in texts[0][1] and "null" not in "".join(texts[0])


def test_a_null_in_json_text_stays() -> None:
    calls = [{"function": {"name": "lookup", "arguments": '{"word": null}'}}]
    parts = learned_parts(build("qwen2_5", {"messages": [QUESTION, assistant("", tool_calls=calls)]}))
    assert '{"word": null}' in parts[0][1]


@pytest.mark.parametrize("known", [True, False])
def test_ids_the_template_refuses_are_replaced(known: bool) -> None:
    messages = [QUESTION, assistant(None, "x", "y"), tool("1"), tool("2", 1), assistant("Two.")]
    for number, call in enumerate(messages[1]["tool_calls"]):
        call["id"] = f"call_{number}" if known else None
        messages[2 + number]["tool_call_id"] = call["id"]
    (_, calls), (before, _) = learned_parts(build("mistral", {"messages": messages}))
    ids = [each["id"] for each in json.loads(calls.removeprefix("[TOOL_CALLS]").removesuffix("</s>"))]
    assert len(set(ids)) == 2 and all(len(each) == 9 for each in ids)
    results = [
        before.index(f'"content": "{n}", "call_id": "{each}"') for n, each in zip("12", ids, strict=True)
    ]
    assert results == sorted(results)


def test_a_system_message_that_moves_is_seen_where_the_model_sees_it() -> None:
    """Mistral's stands in the last question, and only while nothing follows it."""
    system = {"role": "system", "content": "Be brief."}
    messages = [system, QUESTION, assistant("a"), QUESTION, assistant("b")]
    (first, _), (second, _) = learned_parts(build("mistral", {"messages": messages}))
    assert first == "<s>[INST] Be brief.\n\nHow many?[/INST]"
    assert second == "<s>[INST] How many?[/INST] a</s>[INST] Be brief.\n\nHow many?[/INST]"


def test_content_beside_calls_that_the_template_leaves_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    build("llama3", {"messages": [QUESTION, assistant("Let me see.", "x")]})
    assert "leaves out 'content' of answers" in caplog.text


# -- refusals


def bad_call(**changes: Any) -> list[Message]:
    return [
        QUESTION,
        assistant("", tool_calls=[{"function": {"name": "lookup", "arguments": {}, **changes}}]),
    ]


@pytest.mark.parametrize(
    ("family", "row", "reason"),
    [
        ("qwen2_5", {"messages": [assistant("a")]}, "row 0 .*starts with the assistant"),
        (
            "qwen2_5",
            {"messages": bad_call(arguments="{word")},
            "'arguments' .*'lookup' in message 1 of 'messages' of row 0",
        ),
        ("qwen2_5", {"messages": bad_call(arguments=[1])}, "must be a mapping or JSON text"),
        (
            "qwen2_5",
            {"messages": bad_call(name=None)},
            "message 1 of 'messages' of row 0 .*no function with a name",
        ),
        (
            "qwen2_5",
            {"messages": [QUESTION, assistant(tool_calls="call it")]},
            "must be a list, got 'call it'",
        ),
        (
            "qwen2_5",
            {"messages": [{**assistant("", "x"), "role": "user"}, assistant("a")]},
            "message 0 of 'messages' of row 0 .*role is 'user'",
        ),
        ("qwen2_5", {"messages": [QUESTION, assistant("a")], "tools": "lookup"}, "tools of .*row 0"),
        ("qwen2_5", {"messages": [QUESTION, assistant("a")], "tools": [{"type": "x"}]}, "tools of .*row 0"),
        (
            "gemma",
            {"messages": [{"role": "system", "content": "S"}, QUESTION, assistant("a")]},
            "refuses row 0 .*System role not supported",
        ),
        ("llama3", {"messages": [QUESTION, assistant("", "x", "y")]}, "row 0 .*only one call"),
    ],
)
def test_rows_that_cannot_be_used(family: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        build(family, row)


def test_an_answer_the_template_does_not_write_is_refused() -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = chat_tokenizer("qwen2_5", template)
    rows = Rows.from_list([{"messages": [QUESTION, assistant("a")]}])
    with pytest.raises(DataError, match=r"does not write the answer of row 0 .*message 1.*'How many\?'"):
        SFTDataset(SFTDataConfig(train_files=["unused"]), rows, tokenizer)
