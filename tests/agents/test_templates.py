"""Rows of token ids against the rendering of the whole conversation by the template, for the common families."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent_run import chat_tokenizer as number_tokenizer
from tests.agents.chat_tokenizers import FAMILIES, chat_tokenizer, template_text
from verl.agents.base import Message
from verl.agents.templates import ChatTurns
from verl.data.chat import ChatFormat
from verl.data.messages import PROBE_TOOL
from verl.errors import ConfigError

ALLOWED = [
    (family, tools, users)
    for family in FAMILIES
    for tools, users in ((True, False), (False, True), (True, True))
    if not (family == "qwen3" and users) and not (family == "mistral" and tools and users)
]
QUESTION: Message = {"role": "user", "content": "How many?"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}


@cache
def turns_of(family: str, tools: bool, users: bool, history: str = "append", **settings: Any) -> ChatTurns:
    return ChatTurns(
        ChatFormat(chat_tokenizer(family)), tools=tools, users=users, history=history, **settings
    )


def from_template(template: str, *, family: str = "qwen3", **changes: Any) -> ChatTurns:
    asked = {"tools": True, "users": False, "history": "append", **changes}
    return ChatTurns(ChatFormat(chat_tokenizer(family, template)), **asked)


def replaced(family: str, old: str, new: str) -> str:
    """The family's template with a part changed."""
    text = template_text(family)
    assert old in text
    return text.replace(old, new)


def model_turn(family: str, content: str, answers: list[Message]) -> tuple[str, Message]:
    """What the model draws, and the message for it. Mistral's template takes calls only as data."""
    if family == "mistral" and answers[0]["role"] == "tool":
        calls = [(answer["tool_call_id"], {"word": content}) for answer in answers]
        drawn = ", ".join(
            f'{{"name": "lookup", "arguments": {json.dumps(arguments, ensure_ascii=False)}, "id": "{call_id}"}}'
            for call_id, arguments in calls
        )
        listed = [
            {"id": call_id, "type": "function", "function": {"name": "lookup", "arguments": arguments}}
            for call_id, arguments in calls
        ]
        return f"[TOOL_CALLS] [{drawn}]", {"role": "assistant", "content": "", "tool_calls": listed}
    space = " " if family == "mistral" else ""
    return space + content, {"role": "assistant", "content": content}


contents = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(str.strip)
scripts = st.lists(
    st.tuples(contents, st.booleans(), st.lists(contents, min_size=1, max_size=3), st.booleans()),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(("family", "tools", "users"), ALLOWED)
@settings(max_examples=15)
@given(script=scripts, thinking=st.booleans())
def test_a_row_is_the_rendering_of_the_whole_conversation(
    family: str, tools: bool, users: bool, script: list[Any], thinking: bool
) -> None:
    turns = turns_of(family, tools, users)
    shown = [PROBE_TOOL] if tools else []
    messages = [QUESTION]
    row = turns.prompt(messages, shown)
    for content, by_tool, texts, draws_end in script:
        if tools and (by_tool or not users):
            answers = [turns.tool_message("lookup", t, f"call{n:05d}") for n, t in enumerate(texts)]
        else:
            answers = [{"role": "user", "content": texts[0]}]
        if thinking:
            content = f"<think>\nWhy.\n</think>\n\n{content or 'Five.'}"
        text, message = model_turn(family, content, answers)
        drawn = turns.chat.encode([text])[0] + list(turns.end_token_ids) * draws_end
        row += drawn + turns.after(drawn, answers)
        messages += [message, *answers]
        assert turns.text(drawn) == text
    whole = turns.prompt(messages, shown)
    assert turns.chat.tokenizer.decode(row) == turns.chat.tokenizer.decode(whole)
    assert row == whole


def test_what_the_model_drew_stays_as_it_is() -> None:
    """Tokens that no text encodes to ('a' and 'b' apart), and whitespace that the template would trim."""
    turns = turns_of("llama3", True, False)
    a, b, space = (turns.chat.tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "Ġ"))
    drawn = [space, a, b, space, *turns.end_token_ids]
    row = turns.prompt([QUESTION], []) + drawn + turns.after(drawn, [turns.tool_message("f", "1", "x")])
    assert " ab <|eot_id|><|start_header_id|>ipython" in turns.chat.tokenizer.decode(row)
    assert turns.text(drawn) == " ab "


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen3",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"one"<|eot_id|><|start_header_id|>ipython'
            '<|end_header_id|>\n\n"two"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        ),
        (
            "gemma",
            "<end_of_turn>\n<start_of_turn>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
            "</tool_response><end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "smollm2",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "mistral",
            '</s>[TOOL_RESULTS] {"content": "one", "call_id": "call00001"}[/TOOL_RESULTS][TOOL_RESULTS] '
            '{"content": "two", "call_id": "call00002"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_the_answers_to_parallel_calls(family: str, expected: str) -> None:
    turns = turns_of(family, True, False)
    answers = [turns.tool_message("f", "one", "call00001"), turns.tool_message("f", "two", "call00002")]
    assert turns.chat.tokenizer.decode(turns.after([], answers)) == expected
    (end,) = turns.end_token_ids
    rest = turns.chat.tokenizer.decode(turns.after([7, end], answers))
    assert rest == expected.removeprefix(turns.chat.tokenizer.convert_ids_to_tokens(end))


def test_tools_answer_in_a_role_the_template_knows() -> None:
    roles = {family: turns_of(family, True, False).tool_message("f", "1", "c")["role"] for family in FAMILIES}
    assert roles == {
        "smollm2": "user",
        "qwen2_5": "tool",
        "qwen3": "tool",
        "llama3": "tool",
        "gemma": "user",
        "mistral": "tool",
    }
    drops = replaced("qwen2_5", "message.role == 'tool'", "message.role == 'no such'")
    assert from_template(drops, family="qwen2_5").tool_message("f", "1", "c")["role"] == "user"


def test_a_role_that_is_a_special_token_is_known() -> None:
    named = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}<assistant>"
    chat = ChatFormat(chat_tokenizer("qwen3", named))
    assert not ChatTurns(chat, tools=True, users=True, history="append").tool_role
    chat.tokenizer.add_tokens(["<tool>"])
    turns = ChatTurns(ChatFormat(chat.tokenizer), tools=True, users=True, history="append")
    answers = [turns.tool_message("f", text, "c") for text in ("1", "2")]
    assert (
        chat.tokenizer.decode(turns.after([], answers))
        == "<|im_end|><tool>1<|im_end|><tool>2<|im_end|><assistant>"
    )


def test_a_role_that_is_an_unknown_word_is_not_a_special_token() -> None:
    """Other roles become the tokenizer's unknown token, which is listed among its special ones."""
    assert ChatTurns(ChatFormat(number_tokenizer()), tools=True, users=False, history="append").tool_role


def test_turns_that_end_where_the_next_role_begins() -> None:
    """As GLM has it: the model itself draws the token of the role that follows."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.role != 'tool' %}<{{ m.role }}>{% endif %}"
        "{{ '\n' ~ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
    )
    tokenizer = chat_tokenizer("qwen3", template)
    tokenizer.add_tokens(["<user>", "<tool>", "<assistant>"], special_tokens=True)
    turns = ChatTurns(ChatFormat(tokenizer), tools=True, users=True, history="append")
    user, tool = tokenizer.convert_tokens_to_ids(["<user>", "<tool>"])
    assert turns.end_token_ids == (user, tool)
    answers = [turns.tool_message("f", text, "c") for text in ("1", "2")]
    assert tokenizer.decode(turns.after([7, tool], answers)) == "\n1\n2<assistant>\n"
    assert tokenizer.decode(turns.after([7, user], answers)) == "<tool>\n1\n2<assistant>\n"
    assert tokenizer.decode(turns.after([7, user], [QUESTION])) == "\nHow many?<assistant>\n"
    assert turns.text([*turns.chat.encode(["Five."])[0], tool]) == "Five."


def test_call_ids_the_template_would_refuse_are_replaced() -> None:
    turns = turns_of("mistral", True, False)
    given = [turns.tool_message("f", "1", call_id) for call_id in ("", "call_1", "call_2", "abcDEF123")]
    ids = [message["tool_call_id"] for message in given]
    assert len(set(ids)) == 4 and ids[3] == "abcDEF123"
    assert all(len(call_id) == 9 for call_id in ids)
    assert turns.after([], given)
    assert turns_of("qwen3", True, False).tool_message("f", "1", "call_1")["tool_call_id"] == "call_1"


# -- refusals


@pytest.mark.parametrize("tools", [False, True])
def test_thinking_dropped_before_a_question_is_refused_and_can_be_split(tools: bool) -> None:
    with pytest.raises(ConfigError, match=r"'qwen3' drops or rewrites the thinking.*history=split") as error:
        turns_of("qwen3", tools, True)
    assert "<think>" in str(error.value) and "data.chat_template" in str(error.value)
    turns = turns_of("qwen3", tools, True, "split")
    thought = {"role": "assistant", "content": "<think>\nWhy.\n</think>\n\nFive."}
    text = turns.chat.tokenizer.decode(turns.prompt([QUESTION, thought, QUESTION], []))
    assert "Five." in text and "Why." not in text


def test_thinking_always_dropped_is_refused_for_tools_too() -> None:
    template = replaced("qwen3", "loop.index0 > seen.question and (loop.last or thinking)", "false")
    with pytest.raises(ConfigError, match="drops or rewrites the thinking"):
        from_template(template)
    from_template(template, history="split")


def test_an_empty_thinking_block_in_the_header_is_refused_by_name() -> None:
    chat = ChatFormat(chat_tokenizer("qwen3"), {"enable_thinking": False})
    with pytest.raises(
        ConfigError, match=r"'<think>\\n\\n</think>\\n\\n'.*enable_thinking=False.*history=split"
    ):
        ChatTurns(chat, tools=True, users=False, history="append")
    turns = ChatTurns(chat, tools=True, users=False, history="split")
    assert chat.tokenizer.decode(turns.prompt([QUESTION], [])).endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_header_that_opens_the_thinking_is_accepted() -> None:
    header = "{{- '<|im_start|>assistant\\n' -}}\n{%- if enable_thinking"
    template = replaced("qwen3", header, header.replace("assistant\\n", "assistant\\n<think>\\n"))
    turns = from_template(template)
    thought = "Why.\n</think>\n\nFive."
    answers = [turns.tool_message("f", "1", "c")]
    row = turns.prompt([QUESTION], []) + turns.chat.encode([thought])[0] + turns.after([], answers)
    assert row == turns.prompt([QUESTION, {"role": "assistant", "content": thought}, *answers], [])


def test_tools_that_move_with_the_question_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'mistral' rewrites earlier turns.*AVAILABLE_TOOLS.*history=split"
    ):
        turns_of("mistral", True, True)
    turns_of("mistral", True, True, "split")


def test_a_template_that_compares_messages_is_seen_through() -> None:
    """Equal messages would all be the last one."""
    template = (
        "{% for m in messages %}{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
        "{{ tools | tojson }}{% endif %}{{ 'answer' if m.role == 'tool' else m.role }}:{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert from_template(template, tools=True).tool_role
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        from_template(template, tools=True, users=True)


def test_counted_turns_are_refused() -> None:
    counted = (
        "{% for message in messages %}{{ loop.index ~ ':' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ (messages | length + 1) ~ ':assistant\n' }}{% endif %}"
    )
    with pytest.raises(ConfigError, match="after a later turn"):
        from_template(counted, tools=False, users=True)
    from_template(counted, tools=False, users=True, history="split")


def test_a_turn_without_an_end_token_is_refused() -> None:
    plain = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ConfigError, match="not with a special token"):
        from_template(plain)
    turns = from_template(plain, history="split")
    assert turns.end_token_ids == ()
    assert turns.text(turns.chat.encode(["Five.<|im_end|>"])[0]) == "Five."


def test_text_added_around_a_turn_is_refused() -> None:
    template = replaced(
        "gemma", "message.content | trim", "('Answer: ' if role == 'model' else '') + message.content"
    )
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*Answer: "):
        from_template(template, family="gemma")


def test_a_template_is_needed() -> None:
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        from_template("")
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template=never"):
        ChatTurns(
            ChatFormat(chat_tokenizer("qwen3"), apply_chat_template="never"),
            tools=True,
            users=False,
            history="append",
        )


def test_a_template_without_several_turns_is_refused_with_split_too() -> None:
    once = "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}" + template_text(
        "gemma"
    )
    for history in ("append", "split"):
        with pytest.raises(ConfigError, match="cannot be used for several turns.*one question"):
            from_template(once, family="gemma", history=history)


# -- prompts


def test_a_system_message_that_moves_is_refused_where_a_prompt_has_one() -> None:
    turns = turns_of("mistral", True, False)
    turns.check_prompt([QUESTION], [])
    with pytest.raises(ConfigError, match=r"rewrites earlier turns.*Be brief.*for row 3"):
        turns.check_prompt([SYSTEM, QUESTION], [], "row 3")
    turns_of("mistral", True, False, "split").check_prompt([SYSTEM, QUESTION], [])


@pytest.mark.parametrize("family", ["smollm2", "qwen2_5", "qwen3", "llama3"])
def test_other_prompts_pass(family: str) -> None:
    turns = turns_of(family, True, False)
    turns.check_prompt([SYSTEM, QUESTION], [PROBE_TOOL])
    turns.check_prompt([QUESTION, {"role": "assistant", "content": "Five."}, QUESTION], [])
    begun = [QUESTION, {"role": "assistant", "content": "Let me see:"}]
    if (
        family == "qwen3"
    ):  # puts an empty thinking block before the beginning, only while it is the last message
        with pytest.raises(ConfigError, match="leaves it out once the answer is history"):
            turns.check_prompt(begun, [])
    else:
        turns.check_prompt(begun, [])


def test_tools_of_a_prompt_take_the_place_of_the_formats() -> None:
    other = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    chat = ChatFormat(chat_tokenizer("qwen3"), tools=[PROBE_TOOL])
    turns = ChatTurns(chat, tools=True, users=False, history="append")
    text = chat.tokenizer.decode(turns.prompt([QUESTION], [other]))
    assert '"add"' in text and "lookup" not in text
    assert "<tools>" not in chat.tokenizer.decode(turns.prompt([QUESTION], []))


# -- text


def test_only_the_end_of_a_turn_is_removed_from_its_text() -> None:
    turns = turns_of("llama3", True, False)
    encode = turns.chat.encode
    assert turns.text(encode(["a<|end_header_id|>b<|eot_id|>"])[0]) == "a<|end_header_id|>b"
    assert turns.text(encode(["ab<|eot_id|><|eot_id|>"])[0]) == "ab<|eot_id|>"
    assert turns.text(encode(["a<|eom_id|>"])[0]) == "a<|eom_id|>"
    assert turns.text([]) == ""
    eom = turns.chat.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert turns_of("llama3", True, False, stop_ids=(eom,)).text(encode(["a<|eom_id|>"])[0]) == "a"
    gemma = turns_of("gemma", True, False)  # its end of sequence is not its end of turn
    assert (
        gemma.text(gemma.chat.encode(["a<eos>"])[0])
        == "a"
        == gemma.text(gemma.chat.encode(["a<end_of_turn>"])[0])
    )


@settings(max_examples=40)
@given(
    text=st.text(max_size=120), limit=st.integers(1, 60), side=st.sampled_from(["left", "middle", "right"])
)
def test_a_cut_text_has_at_most_so_many_tokens(text: str, limit: int, side: str) -> None:
    turns = turns_of("qwen3", True, False)
    cut = turns.truncate(text, limit, side)
    size = len(turns.chat.encode([text])[0])
    assert len(turns.chat.encode([cut])[0]) <= limit
    assert (cut == text) == (size <= limit)


def test_half_a_character_is_replaced() -> None:
    turns = turns_of("qwen2_5", True, True)
    half = json.loads('"a\\ud83d"')
    assert turns.truncate(half, 10, "right") == "a?" == turns.tool_message("f", half, "c")["content"]
    ids = turns.after([], [{"role": "user", "content": half}])
    assert "a?<|im_end|>" in turns.chat.tokenizer.decode(ids)
    assert ids == turns.after([], [{"role": "user", "content": "a?"}])


def test_where_a_text_is_cut() -> None:
    turns = turns_of("qwen3", True, False)
    text = "".join(map(str, range(10))) * 20
    mark = "\n[... cut ...]\n"
    assert turns.truncate(text, 25, "left") == text[:10] + mark
    assert turns.truncate(text, 25, "right") == mark + text[-10:]
    assert turns.truncate(text, 25, "middle") == text[:5] + mark + text[-5:]
    assert turns.truncate(text, 4, "left") == "0123"
    assert turns.truncate("ab" * 50, 50, "right") == "ab" * 50
