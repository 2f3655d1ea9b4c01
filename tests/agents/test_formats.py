"""The text of a turn becomes calls, or a reason the model can act on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.formats import (
    ToolFormat,
    base,
    detect_format,
    get_format,
    json_calls,
    known_formats,
    marked_calls,
    parser_names,
    parts,
    register_tool_format,
)
from verl.config.sections.rollout import TOOL_FORMATS
from verl.errors import ConfigError

ADD = ToolCall("add", {"a": 1, "b": 2})
WITH_ID = ToolCall("add", {"a": 1, "b": 2}, "a1B2c3D4e")
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
FORMATS = [name for name in TOOL_FORMATS if name != "auto"]


THINKING = [name for name in FORMATS if name != "gpt-oss"]  # which has a channel for it
TAGS = ("qwen3_coder", "minimax_m2", "glm45")
"""Formats whose arguments are all texts."""


def parse(name: str, text: str) -> ParsedTurn:
    return get_format(name).parse(text)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{in_gemma(each, quote)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_gemma(each, quote) for each in value) + "]"
    return as_text(value)


def written(name: str, calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""
    objects = [as_text(call.arguments) for call in calls]
    given = list(zip(calls, objects, strict=True))

    def tagged(parameter: str) -> list[str]:
        return ["".join(parameter.format(k, as_text(v)) for k, v in call.arguments.items()) for call in calls]

    def each(form: str, inside: Sequence[str]) -> list[str]:
        return [
            form.format(call.name, text, n) for n, (call, text) in enumerate(zip(calls, inside, strict=True))
        ]

    match name:
        case "hermes":
            blocks = [as_text({"name": call.name, "arguments": call.arguments}) for call in calls]
            return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)
        case "llama3_json":
            return "; ".join(as_text({"name": call.name, "parameters": call.arguments}) for call in calls)
        case "qwen3_coder":
            blocks = each("<function={0}>\n{1}</function>", tagged("<parameter={}>\n{}\n</parameter>\n"))
            return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)
        case "minimax_m2":
            blocks = each(
                '<invoke name="{0}">\n{1}</invoke>\n', tagged('<parameter name="{}">{}</parameter>\n')
            )
            return "<minimax:tool_call>\n" + "".join(blocks) + "</minimax:tool_call>"
        case "glm45":
            pairs = tagged("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
            return "\n".join(each("<tool_call>{0}\n{1}</tool_call>", pairs))
        case "mistral":
            listed = [
                {"name": c.name, "arguments": c.arguments, **({"id": c.id} if c.id else {})} for c in calls
            ]
            return "[TOOL_CALLS]" + as_text(listed)
        case "mistral_v11":
            ids = [f"[CALL_ID]{call.id}" if call.id else "" for call in calls]
            return "".join(f"[TOOL_CALLS]{c.name}{i}[ARGS]{o}" for (c, o), i in zip(given, ids, strict=True))
        case "deepseek_v3" | "deepseek_v31":
            form = (
                "{0}<｜tool▁sep｜>{1}"
                if name.endswith("1")
                else "function<｜tool▁sep｜>{0}\n```json\n{1}\n```"
            )
            blocks = each(f"<｜tool▁call▁begin｜>{form}<｜tool▁call▁end｜>", objects)
            return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"
        case "kimi_k2":
            form = "<|tool_call_begin|>functions.{0}:{2}<|tool_call_argument_begin|>{1}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|>{''.join(each(form, objects))}<|tool_calls_section_end|>"
        case "gpt-oss":
            form = "<|start|>assistant<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>{1}<|call|>"
            return "".join(each(form, objects)).removeprefix("<|start|>assistant")
        case "gemma4":
            blocks = [in_gemma(call.arguments, '<|"|>') for call in calls]
            return "".join(each("<|tool_call>call:{0}{1}<tool_call|>", blocks))
        case "functiongemma":
            blocks = [in_gemma(call.arguments, "<escape>") for call in calls]
            return "".join(each("<start_function_call>call:{0}{1}<end_function_call>", blocks))
    raise AssertionError(f"how does {name} write calls?")


def plain(turn: ParsedTurn) -> ParsedTurn:
    """Without the ids of calls."""
    return replace(turn, calls=tuple(replace(call, id="") for call in turn.calls))


# ---- every format

names = st.from_regex(r"[A-Za-z_][\w-]{0,10}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<" not in text)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def calls_of(value: st.SearchStrategy) -> st.SearchStrategy[list[ToolCall]]:
    call = st.builds(ToolCall, names, st.dictionaries(names, value, max_size=4))
    return st.lists(call, min_size=1, max_size=3)


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("name", sorted({*FORMATS} - {*TAGS, "gemma4", "functiongemma"}))
@settings(max_examples=15)
@given(calls=calls_of(values))
def test_what_json_formats_write_they_read(name, calls):
    assert plain(parse(name, written(name, calls))) == ParsedTurn("", tuple(calls))


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("name", [*TAGS, "gemma4", "functiongemma"])
@settings(max_examples=20)
@given(calls=calls_of(texts))
def test_what_formats_with_marks_write_they_read(name, calls):
    assert parse(name, written(name, calls)) == ParsedTurn("", tuple(calls))


PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>",
    "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|start|>", "<|channel|>", "final", " to=functions.f",
    "<|end|>", "<|message|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>",
    '<invoke name="f">', '<parameter name="a">', "</invoke>", "</minimax:tool_call>", "<|tool_call>", "call:f", "{a:",
    '<|"|>', "<tool_call|>",
    '{"name":', '"f",', '"arguments":', '"parameters":', "{}", ";", "[", "}", "]", '"', "1",
    '"\\ud800"', "\n",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5)))
def test_any_text_is_taken_apart_without_an_exception(name, pieces):
    turn = parse(name, "".join(pieces))
    assert all(call.name and isinstance(call.arguments, dict) for call in turn.calls)
    json.dumps([call.arguments for call in turn.calls], allow_nan=False, ensure_ascii=False).encode()


def spelled(name: str, text: str) -> str:
    """With the format's own marks of thinking."""
    begin, end = getattr(get_format(name), "thinking", ("<think>", "</think>"))
    return text.replace("<think>", begin).replace("</think>", end)


def parsed(name: str, text: str) -> ParsedTurn:
    return plain(parse(name, spelled(name, text)))


@pytest.mark.parametrize("name", THINKING)
def test_a_call_in_a_thinking_block_is_not_made(name):
    call = written(name, [ADD])
    assert parsed(name, f"<think>I could write {call}").calls == ()
    assert parsed(name, f"{call}</think>").calls == ()
    assert parsed(name, f"<think>a</think>\n<think>{call}</think>").calls == ()
    assert parsed(name, f"<think>a</think>\n<think>b</think>{call}").calls
    turn = parsed(name, f"<think>{call}</think>\n{call}")
    assert [call.name for call in turn.calls] == ["add"]
    assert turn.content == spelled(name, f"<think>{call}</think>")


@pytest.mark.parametrize("name", THINKING)
def test_marks_of_thinking_inside_an_argument_are_text(name):
    call = ToolCall("write", {"text": spelled(name, "<think> and </think>")})
    assert parsed(name, f"<think>Write it.</think>{written(name, [call])}").calls == (call,)


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("value", ["what is </think>?", "<think>x</think>", "</think></think>"])
def test_a_closing_mark_of_thinking_inside_an_argument_ends_no_thinking(name, value):
    render = partial(written, name)
    first, call = ToolCall("add", {"a": "1"}), ToolCall("write", {"text": spelled(name, value)})
    assert parsed(name, render([call])).calls == (call,)
    assert parsed(name, render([first, call])).calls == (first, call)
    assert parsed(name, render([call, call])).calls == (call, call)
    assert parsed(name, f"{render([call])}</think>\n{render([first])}").calls == (first,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>{</tool_call></think>"),
        ("qwen3_coder", "<tool_call></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a></tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": {}};{'),
        ("llama3_json", '{"name"'),
        ("mistral", "[TOOL_CALLS][{"),
        ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"a'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f">'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
        ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a'),
    ],
)
def test_a_turn_of_many_wrong_calls_is_not_read_for_ever(name, text, monkeypatch):
    """What is wrong is said of some calls: each takes time in proportion to the turn."""
    reads: list[int] = []
    for owner, part in (
        (parts, "decode"),
        (json_calls, "decode"),
        (marked_calls, "decode"),
        (marked_calls.Qwen3Coder, "_read"),
    ):
        function = getattr(owner, part)
        counted = lambda *given, function=function: reads.append(1) or function(*given)  # noqa: E731
        monkeypatch.setattr(owner, part, counted)
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
        ("{}", "not the name of a function"),
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


# ---- the others


@pytest.mark.parametrize(
    ("name", "text", "turn"),
    [
        ("mistral", f"I add.[TOOL_CALLS] [{ADD_JSON[:-1]}, \"id\": \"a1B2c3D4e\"}}]", ParsedTurn("I add.", (WITH_ID,))),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', ParsedTurn("", (ADD,))),
        ("mistral_v11", '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1, "b": 2}', ParsedTurn("", (WITH_ID,))),
        ("deepseek_v3", f"So:{written('deepseek_v31', [ADD])}", ParsedTurn("So:", (ADD,))),
        ("deepseek_v31", written("deepseek_v3", [ADD]), ParsedTurn("", (ADD,))),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>',
         ParsedTurn("", (ToolCall("function", {}),))),
        ("glm45", "<tool_call>now</tool_call>", ParsedTurn("", (ToolCall("now", {}),))),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>",
         ParsedTurn("", (ToolCall("add", {"a": "[1]"}),))),
        ("gemma4", '<|tool_call>call:f{a:{b:[1,<|"|>{x:1}<tool_call|><|"|>],c:true},d:null}<tool_call|>',
         ParsedTurn("", (ToolCall("f", {"a": {"b": [1, "{x:1}<tool_call|>"], "c": True}, "d": None}),))),
        ("gpt-oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}', ParsedTurn("", (ADD,))),
        ("gpt-oss", "<|channel|>analysis<|message|>Add. {}<|end|>"
         "<|start|>assistant<|channel|>final<|message|>Three.", ParsedTurn("Three.", thinking="Add. {}")),
        ("gpt-oss", "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
         '<|channel|>analysis to=functions.add code<|message|>{"a": 1, "b": 2}<|call|>', ParsedTurn("I add.", (ADD,))),
        ("gpt-oss", '<|channel|>commentary to=functions.say<|message|>{"text": "<|end|><|start|><|message|>"}<|call|>',
         ParsedTurn("", (ToolCall("say", {"text": "<|end|><|start|><|message|>"}),))),
    ],
)  # fmt: skip
def test_forms_that_a_family_has_beside_the_usual_one(name, text, turn):
    assert parse(name, text) == turn


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mistral", "[TOOL_CALLS][]", "no calls"),
        ("mistral", '[TOOL_CALLS][{"name": "f"', "not valid JSON"),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS][1]", "not the name of a function and its arguments"),
        ("deepseek_v3", written("deepseek_v3", [ADD]).replace("<｜tool▁call▁end｜>", ""), "follows its arguments"),
        ("kimi_k2", "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", "not the name of a function"),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', "not the name of a function"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key></tool_call>", "not closed by </tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"></minimax:tool_call>', "not closed by </invoke>"),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>", "not valid JSON"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>b}<tool_call|>', "not closed by"),
        ("gemma4", "<|tool_call>call:f{}{}<tool_call|>", "followed by"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "a list, not a JSON object"),
        ("gpt-oss", "<|channel|>commentary to=python<|message|>print(1)<|call|>", "not valid JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_said(name, text, words):
    turn = parse(name, text)
    assert words in turn.problems[0] and get_format(name).example in turn.problems[0] and not turn.calls


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_was_begun_for_the_model_is_read(name):
    begun, rest = get_format(name).begin("add"), written(name, [ADD])
    assert begun is not None and begun.startswith(str(get_format(name).begin(None)))
    for letter in "".join(begun.split()):
        assert rest.lstrip().startswith(letter)
        rest = rest.lstrip()[1:]
    assert [call.name for call in parse(name, begun + rest).calls] == ["add"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("calls", [[], [ADD]], ids=["no call", "a call"])
def test_what_is_visible_of_a_turn_that_goes_on_is_the_beginning_of_its_content(name, calls):
    text = f"I see. {written(name, calls) if calls else 'That is < 4.'}"
    if name == "gpt-oss":
        said = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>{}<|message|>I see <|end|>"
        text = said.format(
            "commentary" if calls else "final"
        ) + f"<|start|>assistant{written(name, calls)}" * bool(calls)
    shown = [get_format(name).visible(text[:length]) for length in range(len(text) + 1)]
    content = parse(name, text).content
    assert all(content.startswith(each) for each in shown)
    assert [*shown] == sorted(shown, key=len)
    assert shown[-1] == ("" if name == "llama3_json" else content)


# ---- choosing


def test_the_config_offers_every_format():
    others = parser_names()
    found = {name: type(get_format(name)).__module__ for name in known_formats() if name not in others}
    # Other tests of the process register formats, too.
    ours = [name for name, module in found.items() if module.startswith("verl.agents.formats.")]
    assert FORMATS and sorted(FORMATS) == ours


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call>\\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>", "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "hermes"),
        ("", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' ~ name ~ '[ARGS]' }}", "mistral_v11"),
        ("'<｜tool▁calls▁begin｜>' + tool.type + '<｜tool▁sep｜>' + name + '\\n```json'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.name + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>", "glm45"),
    ],
)  # fmt: skip
def test_the_template_tells_the_format(template, name):
    assert detect_format(template) == name


def test_formats_can_be_added_and_unknown_ones_are_named(monkeypatch):
    monkeypatch.setattr(base, "_formats", dict(base._formats))

    @register_tool_format("shout")
    class Shout(ToolFormat):
        example = "ADD"

        def parse(self, text):
            return ParsedTurn("", (ToolCall(text.lower(), {}),))

    assert parse("shout", "ADD").calls == (ToolCall("add", {}),)
    assert "shout" in known_formats()
    with pytest.raises(ConfigError, match=r"'whisper' is not known; known: auto, .*hermes.*shout"):
        get_format("whisper")
