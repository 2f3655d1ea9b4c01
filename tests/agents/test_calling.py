"""Calls through the chat templates of families that have a format of their own: what a template writes is read, and the
rows of conversations with calls are what it renders."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.chat_tokenizers import CALLING, chat_tokenizer, template_text
from verl.agents.base import Message, ToolCall
from verl.agents.formats import ToolFormat, detect_format, get_format
from verl.agents.schemas import fit_arguments
from verl.agents.templates import ChatTurns
from verl.data.chat import ChatFormat
from verl.errors import ConfigError

QUESTION: Message = {"role": "user", "content": "How many?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "count": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}
APPENDING = sorted({*CALLING} - {"glm45"})  # whose template puts thinking blocks in front of answers
ONE_CALL = ("gpt_oss",)


def format_of(family: str) -> ToolFormat:
    return get_format(detect_format(template_text(family)))


@cache
def turns_of(family: str, history: str = "append") -> ChatTurns:
    chat = ChatFormat(chat_tokenizer(family))
    return ChatTurns(chat, tools=True, users=False, history=history, tool_format=format_of(family))


def called(calls: list[ToolCall], content: str = "") -> Message:
    listed = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def rendered(family: str, messages: list[Message], generate: bool = False) -> str:
    chat = turns_of(family, "split").chat
    return chat.tokenizer.decode(
        chat.encode([chat.render(chat.taken(messages, [TOOL]), generate=generate, tools=[TOOL], drawn=True)])[
            0
        ]
    )


def drawn_text(family: str, turn: Message) -> str:
    """What the model draws for a message with calls, as the template writes it."""
    whole, header = rendered(family, [QUESTION, turn]), rendered(family, [QUESTION], generate=True)
    if family == "minimax_m2":  # the header begins a thought
        header = header.removesuffix("<think>\n")
    assert whole.startswith(header)
    text = whole.removeprefix(header).rstrip("\n")
    for end in (chat_tokenizer(family).eos_token, "<|im_end|>", "<|call|>"):
        text = text.removesuffix(end)
    return text


def numbered(family: str, calls: list[ToolCall], first: int) -> list[ToolCall]:
    """With the ids that the family's models write."""
    names = {"kimi_k2": "functions.lookup:{}", "mistral": "call{:05d}", "mistral_v11": ""}
    form = names.get(family, "")
    return [ToolCall(call.name, call.arguments, form.format(first + n)) for n, call in enumerate(calls)]


words = st.text(st.characters(codec="utf-8", exclude_characters="\0<"), min_size=1, max_size=8)
arguments = st.fixed_dictionaries(
    {}, optional={"word": words, "count": st.integers(-5, 5), "tags": st.lists(words, max_size=2)}
)
several = st.lists(arguments.map(lambda given: ToolCall("lookup", given)), min_size=1, max_size=3)


@pytest.mark.parametrize("family", CALLING)
@settings(max_examples=12)
@given(calls=several)
def test_what_the_template_writes_is_read(family: str, calls: list[ToolCall]) -> None:
    calls = numbered(family, calls[: 1 if family in ONE_CALL else 3], 0)
    text = drawn_text(family, called([ToolCall(c.name, c.arguments, c.id or "call00001") for c in calls]))
    turn = format_of(family).parse(text)
    assert not turn.problems and turn.content in ("", "<think></think>")
    fitted = [ToolCall(c.name, fit_arguments(TOOL, c.arguments), c.id) for c in turn.calls]
    assert fitted == calls


@pytest.mark.parametrize("family", CALLING)
def test_special_tokens_that_arguments_spell_do_not_end_the_call(family: str) -> None:
    """Where texts stand between marks or in JSON."""
    tokenizer = chat_tokenizer(family)
    ends = ["<|end|><|start|>", str(tokenizer.eos_token), "</tool_call>", "<|tool_call_end|>"]
    call = numbered(family, [ToolCall("lookup", {"word": "".join(ends)})], 0)
    text = drawn_text(family, called([ToolCall(c.name, c.arguments, c.id or "call00001") for c in call]))
    assert list(format_of(family).parse(text).calls) == call


@pytest.mark.parametrize("family", APPENDING)
@pytest.mark.parametrize("draws_end", [True, False])
def test_a_row_with_calls_is_the_rendering_of_its_messages(family: str, draws_end: bool) -> None:
    turns, tool_format = turns_of(family), format_of(family)
    encode, end = turns.chat.encode, {"gpt_oss": "<|call|>", "gemma4": "<|tool_response>"}.get(family)
    messages = [QUESTION]
    row = turns.prompt(messages, [TOOL])
    first = 0
    for calls in ([{"word": "a"}], [{"count": 2}, {"tags": ["x", "y"]}], [{"word": 'b"\n'}]):
        made = numbered(
            family, [ToolCall("lookup", each) for each in calls[: 1 if family in ONE_CALL else 2]], first
        )
        first += len(made)
        thought = "Well.\n</think>\n\n" if family == "minimax_m2" else ""
        plain = [ToolCall(c.name, c.arguments, c.id or f"call{n:05d}") for n, c in enumerate(made)]
        text = drawn_text(family, called(plain, f"<think>\n{thought}" if thought else "")).removeprefix(
            "<think>\n"
        )
        parsed = tool_format.parse(text)
        answers = [
            turns.tool_message("lookup", f"found {n}", call.id or f"call{n:05d}")
            for n, call in enumerate(parsed.calls)
        ]
        assert [message["role"] for message in answers] == ["tool"] * len(made)
        ids = [turns.chat.tokenizer.convert_tokens_to_ids(end)] if end else list(turns.end_token_ids)
        drawn = encode([text])[0] + ids * draws_end
        row += drawn + turns.after(drawn, answers)
        messages += [called(plain, thought), *answers]
        assert turns.text(drawn) == text
    taken = turns.chat.taken(messages, [TOOL])
    whole = encode([turns._render(taken, tools=[TOOL])])[0]
    decode = turns.chat.tokenizer.decode
    # The recipient of a call stands in either place of the header.
    assert decode(row).replace("<|constrain|>", "") == decode(whole)
    assert {*turns.end_token_ids} <= turns.stop_ids


def test_thinking_blocks_in_front_of_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'glm45' .*history=split"):
        turns_of("glm45")


@pytest.mark.parametrize("family", CALLING)
def test_a_prompt_of_split_turns_has_the_calls_as_the_template_writes_them(family: str) -> None:
    turns, made = turns_of(family, "split"), numbered(family, [ToolCall("lookup", {"word": "a"})], 0)
    plain = [ToolCall(c.name, c.arguments, c.id or "call00001") for c in made]
    text = drawn_text(family, called(plain))
    answer = turns.tool_message("lookup", "found it", plain[0].id)
    assert answer["role"] == "tool"
    prompt = turns.chat.tokenizer.decode(
        turns.prompt([QUESTION, {"role": "assistant", "content": text}, answer], [TOOL])
    )
    assert prompt == rendered(family, [QUESTION, called(plain), answer], generate=True)
    unreadable = {"role": "assistant", "content": text.replace("lookup", "").replace("{", "")}
    answer = {**answer, "content": "Error: read no call"}
    prompt = turns.chat.tokenizer.decode(turns.prompt([QUESTION, unreadable, answer], [TOOL]))
    assert "Error: read no call" in prompt


# ---- gpt-oss


def test_the_channels_of_earlier_turns_are_given_to_the_template_apart() -> None:
    turns = turns_of("gpt_oss", "split")
    assert {turns.chat.tokenizer.convert_ids_to_tokens(end) for end in turns.end_token_ids} == {
        "<|call|>",
        "<|return|>",
    }
    thought = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"word": "a"}'
    final = "<|channel|>final<|message|>Two."
    answer = turns.tool_message("lookup", "found", "call_0")
    said = [{"role": "assistant", "content": text} for text in (thought + call, thought + final)]
    prompt = turns.chat.tokenizer.decode(turns.prompt([QUESTION, said[0], answer, said[1], QUESTION], []))
    assert (
        "How many?<|end|><|start|>assistant<|channel|>analysis<|message|>Look.<|end|>"
        '<|start|>assistant to=functions.lookup<|channel|>commentary json<|message|>{"word": "a"}<|call|>'
        '<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>"found"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Two.<|end|><|start|>user"
    ) in prompt


def test_the_end_of_an_answer_that_history_rewrites_is_refused() -> None:
    given: Any = {"tools": True, "users": True, "tool_format": format_of("gpt_oss")}
    chat = ChatFormat(chat_tokenizer("gpt_oss"))
    with pytest.raises(ConfigError, match="history=split"):
        ChatTurns(chat, history="append", **given)
    ChatTurns(chat, history="split", **given)
