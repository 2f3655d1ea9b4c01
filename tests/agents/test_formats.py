"""The text of a turn becomes calls, or a reason the model can act on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agents import formats
from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.formats import (
    ToolFormat,
    detect_format,
    get_format,
    known_formats,
    register_tool_format,
)
from verl.config.sections.rollout import TOOL_FORMATS
from verl.errors import ConfigError

ADD = ToolCall("add", {"a": 1, "b": 2})
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
FORMATS = [name for name in TOOL_FORMATS if name != "auto"]


def parse(name: str, text: str) -> ParsedTurn:
    return get_format(name).parse(text)


def written(name: str, calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    if name == "llama3_json":
        return "; ".join(text({"name": call.name, "parameters": call.arguments}) for call in calls)
    blocks = [text({"name": call.name, "arguments": call.arguments}) for call in calls]
    if name == "qwen3_coder":
        lines = "<parameter={}>\n{}\n</parameter>\n"
        parameters = ["".join(lines.format(k, text(v)) for k, v in call.arguments.items()) for call in calls]
        blocks = [
            f"<function={call.name}>\n{inside}</function>"
            for call, inside in zip(calls, parameters, strict=True)
        ]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


# ---- every format

names = st.from_regex(r"[A-Za-z_][\w-]{0,10}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "</parameter>" not in text)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def calls_of(value: st.SearchStrategy) -> st.SearchStrategy[list[ToolCall]]:
    call = st.builds(ToolCall, names, st.dictionaries(names, value, max_size=4))
    return st.lists(call, min_size=1, max_size=3)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@settings(max_examples=20)
@given(calls=calls_of(values))
def test_what_json_formats_write_they_read(name, calls):
    assert parse(name, written(name, calls)) == ParsedTurn("", tuple(calls))


@settings(max_examples=20)
@given(calls=calls_of(texts))
def test_what_qwen3_coder_writes_it_reads(calls):
    assert parse("qwen3_coder", written("qwen3_coder", calls)) == ParsedTurn("", tuple(calls))


PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>",
    "<think>", "</think>", '{"name":', '"f",', '"arguments":', '"parameters":', "{}", ";", "[", "}", "]", '"', "1",
    '"\\ud800"', "\n",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5)))
def test_any_text_is_taken_apart_without_an_exception(name, pieces):
    turn = parse(name, "".join(pieces))
    assert all(call.name and isinstance(call.arguments, dict) for call in turn.calls)
    json.dumps([call.arguments for call in turn.calls], allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_a_thinking_block_is_not_made(name):
    call = written(name, [ADD])
    assert parse(name, f"<think>I could write {call}").calls == ()
    assert parse(name, f"{call}</think>").calls == ()
    assert parse(name, f"<think>a</think>\n<think>{call}</think>").calls == ()
    assert parse(name, f"<think>a</think>\n<think>b</think>{call}").calls
    turn = parse(name, f"<think>{call}</think>\n{call}")
    assert [call.name for call in turn.calls] == ["add"]
    assert turn.content == f"<think>{call}</think>"


@pytest.mark.parametrize("name", FORMATS)
def test_marks_of_thinking_inside_an_argument_are_text(name):
    call = ToolCall("write", {"text": "<think> and </think>"})
    assert parse(name, f"<think>Write it.</think>{written(name, [call])}").calls == (call,)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", ["what is </think>?", "<think>x</think>", "</think></think>"])
def test_a_closing_mark_of_thinking_inside_an_argument_ends_no_thinking(name, value):
    render = partial(written, name)
    first, call = ToolCall("add", {"a": "1"}), ToolCall("write", {"text": value})
    assert parse(name, render([call])).calls == (call,)
    assert parse(name, render([first, call])).calls == (first, call)
    assert parse(name, render([call, call])).calls == (call, call)
    assert parse(name, f"{render([call])}</think>\n{render([first])}").calls == (first,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>{</tool_call></think>"),
        ("qwen3_coder", "<tool_call></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a></tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": {}};{'),
        ("llama3_json", '{"name"'),
    ],
)
def test_a_turn_of_many_wrong_calls_is_not_read_for_ever(name, text, monkeypatch):
    """What is wrong is said of some calls: each takes time in proportion to the turn."""
    reads: list[int] = []
    decode, read = formats._decode, formats.Qwen3Coder._read
    monkeypatch.setattr(formats, "_decode", lambda *given: reads.append(1) or decode(*given))
    monkeypatch.setattr(formats.Qwen3Coder, "_read", lambda *given: reads.append(1) or read(*given))
    turn = parse(name, text * 2000)
    assert len(reads) < 20
    assert len(turn.problems) <= 11
    if len(turn.problems) == 11:
        assert turn.problems[-1] == "Further calls were not read."


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_a_call_stays_as_it_is(name):
    for text in ("The answer is 3.", '{"answer": 3}', ""):
        assert parse(name, text) == ParsedTurn(text)


@pytest.mark.parametrize("name", FORMATS)
def test_the_example_that_the_model_is_shown_can_be_read(name):
    turn = parse(name, get_format(name).example)
    assert [call.name for call in turn.calls] == ["tool"] and not turn.problems


# ---- hermes


def test_hermes_reads_several_calls_and_what_is_around_them():
    turn = parse(
        "hermes", f"I add.<tool_call>{ADD_JSON}</tool_call> then\n<tool_call>\n{ADD_JSON}\n</tool_call>"
    )
    assert turn == ParsedTurn("I add. then", (ADD, ADD))


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{ADD_JSON}",  # the turn ended where </tool_call> was a stop text
        f"<tool_call>{ADD_JSON}\n{ADD_JSON}</tool_call>",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
        '<tool_call>{"name": "add", "parameters": {"a": 1, "b": 2}}</tool_call>',
    ],
)
def test_hermes_reads_what_models_write_instead(text):
    turn = parse("hermes", text)
    assert set(map(repr, turn.calls)) == {repr(ADD)} and not turn.problems


def test_a_closing_mark_inside_an_argument_does_not_close_the_call():
    call = ToolCall("write", {"text": "</tool_call>"})
    assert parse("hermes", written("hermes", [call])).calls == (call,)


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ('{"name": "add", "arguments": {"a": 1,}}', "not valid JSON"),
        ('{"name": "add", "arguments": {"a": 1', "not valid JSON"),
        ("", "not valid JSON"),
        ('{"arguments": {"a": 1}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', 'no "name"'),
        ('{"name": "add", "arguments": [1, 2]}', '"arguments" is a list, not a JSON object'),
        ('{"name": "add", "arguments": "3"}', '"arguments" is a number, not a JSON object'),
        ("[1]", "a list, not a JSON object"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "invalid Unicode"),
        ("[" * 200 + "]" * 200, "nested"),
        ("[" * 100_000, "nested"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "Exceeds the limit"),
    ],
)
def test_a_malformed_call_is_answered_with_the_reason_and_an_example(inside, words):
    turn = parse("hermes", f"before <tool_call>{inside}</tool_call> after<tool_call>{ADD_JSON}</tool_call>")
    (problem,) = turn.problems
    assert words in problem and '"arguments": {' in problem and len(problem) < 400
    assert turn.calls == (ADD,)
    assert turn.content == "before  after"


# ---- qwen3_coder


def test_qwen3_coder_keeps_lines_and_marks_of_other_formats_in_a_value():
    code = 'def f():\n    return "</function> {}"\n'
    text = (
        f"Let me run it.\n<tool_call>\n<function=python>\n<parameter=code>\n{code}\n</parameter>\n"
        "<parameter=count>3</parameter>\n</function>\n</tool_call>"
    )
    call = ToolCall("python", {"code": code, "count": "3"})
    assert parse("qwen3_coder", text) == ParsedTurn("Let me run it.", (call,))


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("{}", "no <function=...>"),
        ("<function=f><parameter=a>1</function>", "<parameter=a> is not closed"),
        ("<function=f><parameter=a>1</parameter>", "<function=f> is not closed"),
        ("<function=f>1</function>", "<function=f> is not closed"),
        ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "twice"),
    ],
)
def test_qwen3_coder_says_what_is_wrong(inside, words):
    turn = parse("qwen3_coder", f"<tool_call>{inside}</tool_call>")
    assert words in turn.problems[0] and not turn.calls


def test_values_that_are_no_text_are_written_as_json():
    rendered = written("qwen3_coder", [ToolCall("f", {"a": [1, True], "b": "x"})])
    assert "\n[1, true]\n" in rendered and "\nx\n" in rendered


# ---- llama3_json


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ParsedTurn("", (ADD,))),
        ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', ParsedTurn("", (ADD,))),
        (f"<|python_tag|>{ADD_JSON}<|eom_id|>", ParsedTurn("", (ADD,))),
        (f"I add. <|python_tag|>{ADD_JSON}; {ADD_JSON}", ParsedTurn("I add.", (ADD, ADD))),
        (f"  {ADD_JSON} ok", ParsedTurn("ok", (ADD,))),
    ],
)
def test_llama3_json_reads_bare_json_and_the_python_tag(text, turn):
    assert parse("llama3_json", text) == turn


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        ("<|python_tag|>print(1)", "not valid JSON"),
        ('<|python_tag|>{"parameters": {}}', 'no "name"'),
        ('{"name": "add", "parameters": 3}', '"parameters" is a number'),
    ],
)
def test_llama3_json_says_what_is_wrong(text, words):
    turn = parse("llama3_json", text)
    assert words in turn.problems[0] and not turn.calls


# ---- choosing


def test_the_config_offers_every_format():
    assert set(FORMATS) <= set(known_formats())


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>", "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "hermes"),
        ("", "hermes"),
    ],
)  # fmt: skip
def test_the_template_tells_the_format(template, name):
    assert detect_format(template) == name


def test_a_template_with_another_format_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"Mistral.*\[TOOL_CALLS\].*hermes.*multi_turn.format"):
        detect_format("{{ '[TOOL_CALLS] ' }}")


def test_formats_can_be_added_and_unknown_ones_are_named(monkeypatch):
    from verl.agents import formats

    monkeypatch.setattr(formats, "_formats", dict(formats._formats))

    @register_tool_format("shout")
    class Shout(ToolFormat):
        example = "ADD"

        def parse(self, text):
            return ParsedTurn("", (ToolCall(text.lower(), {}),))

    assert parse("shout", "ADD").calls == (ToolCall("add", {}),)
    assert "shout" in known_formats()
    with pytest.raises(ConfigError, match=r"'whisper' is not known; known: auto, .*hermes.*shout"):
        get_format("whisper")
