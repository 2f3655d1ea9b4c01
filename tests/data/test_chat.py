"""Tokenizer loading and chat templates."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.data.chat import ChatFormat
from verl.data.messages import read_messages
from verl.data.tokenizer import load_tokenizer, truncate, warn_of_vocabulary
from verl.errors import ConfigError, DataError, ModelError

USER = [{"role": "user", "content": "hi"}]


def ids_of(chat: ChatFormat, prompt: Any) -> list[int]:
    return chat.encode_prompts([prompt], ["a row"])[0][2]


def test_messages_end_with_the_assistants_header(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    raw, text = chat.prompt_text(USER)
    assert raw == USER and text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = ids_of(chat, USER)
    assert ids == tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text


def test_strings_are_used_as_they_are(tokenizer: Any) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    chat = ChatFormat(tokenizer)
    assert chat.prompt_text(text) == (text, text)
    assert tokenizer.decode(ids_of(chat, text)) == text


def test_a_beginning_token_comes_exactly_once_and_only_before_strings(new_tokenizer: Callable) -> None:
    tokenizer = new_tokenizer(bos=True)
    chat = ChatFormat(tokenizer)
    assert tokenizer.decode(ids_of(chat, "hi")) == "<bos>hi"
    assert tokenizer.decode(ids_of(chat, "<bos>hi")) == "<bos>hi"
    assert ids_of(chat, USER)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids_of(ChatFormat(tokenizer, apply_chat_template="never"), USER)) == "<bos>hi"


def test_a_last_assistant_message_is_continued_and_said(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begun = [*USER, {"role": "assistant", "content": "Let me"}]
    chat = ChatFormat(tokenizer)
    for _ in range(2):
        assert chat.prompt_text(begun, "row 4")[1].endswith("<|im_start|>assistant\nLet me")
    assert caplog.text.count("row 4 ends with the assistant's message") == 1


def test_system_prompt_only_where_there_is_none(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    chat = ChatFormat(tokenizer, system_prompt="Be brief.")
    assert chat.prompt_text(USER)[1].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert "Be brief" not in chat.prompt_text(own)[1]
    with caplog.at_level(logging.WARNING):
        assert chat.prompt_text("text")[1] == "text"
        chat.prompt_text("text")
    assert caplog.text.count("data.system_prompt has no effect") == 1


def test_template_arguments_reach_the_template(new_tokenizer: Callable) -> None:
    tokenizer = new_tokenizer(template="{{ messages[0]['content'] }}{{ ' /think' if thinking else '' }}")
    assert ChatFormat(tokenizer, {"thinking": True}).prompt_text(USER)[1] == "hi /think"
    assert ChatFormat(tokenizer).prompt_text(USER)[1] == "hi"
    for ours in ("tokenize", "add_generation_prompt", "tools"):
        with pytest.raises(ConfigError, match=ours):
            ChatFormat(tokenizer, {ours: True})


def test_tools_are_shown(new_tokenizer: Callable) -> None:
    tokenizer = new_tokenizer(template="{% for t in tools %}{{ t.function.name }}{% endfor %}")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert ChatFormat(tokenizer, tools=[tool]).prompt_text(USER)[1] == "add"


ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tools_of_a_row_take_the_place_of_those_of_all_rows(new_tokenizer: Callable) -> None:
    tokenizer = new_tokenizer(template="{% for t in tools or [] %}{{ t.function.name }}{% endfor %}")
    chat = ChatFormat(tokenizer, tools=[ADD])
    other = {"type": "function", "function": {"name": "subtract", "parameters": {}}}
    rows = chat.encode_prompts([USER, USER, USER], ["a", "b", "c"], [[other], [], [ADD, other]])
    assert [text for _, text, _ in rows] == ["subtract", "", "addsubtract"]


def test_a_template_without_a_place_for_tools_gets_them_as_text(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, tools=[ADD])
    assert chat.ignores_tools
    text = chat.render(USER, generate=True)
    head, tail = text.split("</tool_response>", 1)
    assert head.startswith("<|im_start|>system\nYou can call functions.") and json.dumps(ADD) in head
    assert tail.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    system = {"role": "system", "content": "Be brief."}
    instructed = chat.render([system, *USER], generate=True)
    assert (
        instructed.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
        and instructed.count("system") == 1
    )
    assert (
        ChatFormat(tokenizer, system_prompt="Be brief.", tools=[ADD]).render(USER, generate=True)
        == instructed
    )
    assert chat.render(USER, generate=True, tools=[]) == ChatFormat(tokenizer).render(USER, generate=True)


@pytest.mark.parametrize(
    "system", ["{{ raise_exception('no system') }}", "{{ '' }}"], ids=["refused", "left out"]
)
def test_tools_as_text_where_there_is_no_system_message(new_tokenizer: Callable, system: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        + system
        + "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    text = ChatFormat(new_tokenizer(template=template), tools=[ADD]).render([*USER, *USER], generate=True)
    assert text.startswith("[You can call functions.") and text.endswith("\n\nhi][hi]")


STRING_NOTICE = (
    "prompts that are strings, for example of row 1, are used as they are, without the chat template"
)


def test_a_string_prompt_without_the_template_is_worth_one_line(
    new_tokenizer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = new_tokenizer()
    for _ in range(2):  # a format for each batch of a dataloader
        chat = ChatFormat(tokenizer)
        assert chat.encode_prompts(["hi", "ho"], ["row 1", "row 2"])[0][:2] == ("hi", "hi")
    assert caplog.text.count("prompts that are strings") == 1 and STRING_NOTICE in caplog.text
    assert "data.apply_chat_template=always" in caplog.text


@pytest.mark.parametrize(
    ("template", "use", "prompt"),
    [
        ("{{ messages }}", "never", "hi"),
        ("{{ messages }}", "always", "hi"),
        (None, "auto", "hi"),
        ("{{ messages }}", "auto", "<|im_start|>user\nhi<|im_end|>"),
        ("{{ messages }}", "auto", USER),
    ],
)
def test_no_line_where_it_is_meant(
    template: str | None, use: str, prompt: Any, new_tokenizer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    ChatFormat(new_tokenizer(template=template), apply_chat_template=use).prompt_text(prompt)
    assert not caplog.text


def test_a_string_becomes_a_message_of_the_user(new_tokenizer: Callable) -> None:
    tokenizer = new_tokenizer(bos=True)
    chat = ChatFormat(tokenizer, apply_chat_template="always", system_prompt="s")
    asked, written = (chat.encode_prompts([prompt], ["a row"])[0] for prompt in ("hi", USER))
    assert asked == written and asked[0] == USER
    assert asked[1].startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi")
    with pytest.raises(DataError, match="neither a string nor a list of messages"):
        chat.prompt_text(7)


def test_templated_strings_must_show_the_tools_themselves(
    new_tokenizer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, other = new_tokenizer(), new_tokenizer()
    chat = ChatFormat(tokenizer, tools=[ADD])
    assert [chat.prompt_text("plain")[1] for _ in range(2)] == ["plain"] * 2
    assert caplog.text.count("the tools are not added") == 1
    caplog.clear()
    assert ChatFormat(other).prompt_text("plain", "a row", [ADD])[1] == "plain"
    assert "the tools are not added" in caplog.text


def test_without_a_template_the_options_are_named(new_tokenizer: Callable) -> None:
    tokenizer = new_tokenizer(template=None)
    with pytest.raises(
        ModelError, match=r"no chat template.*data.chat_template=FILE.*data.apply_chat_template=never"
    ):
        ChatFormat(tokenizer).prompt_text(USER)
    assert ChatFormat(tokenizer).prompt_text("plain")[1] == "plain"
    two = [{"role": "system", "content": "s"}, *USER]
    assert ChatFormat(tokenizer, apply_chat_template="never").prompt_text(two)[1] == "s\nhi"


def test_a_template_that_refuses_names_the_row(new_tokenizer: Callable) -> None:
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ messages[0].x.y }}", "{% bad"):
        with pytest.raises(DataError, match="row 7 of x"):
            ChatFormat(new_tokenizer(template=template)).prompt_text(USER, "row 7 of x")


@pytest.mark.parametrize(
    "prompt", [None, 3, [], {}, ["hi"], [{"content": "x"}], [{"role": "user"}], [{"role": 1}]]
)
def test_prompts_of_no_known_kind_are_refused(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(DataError, match="he prompt of row 1|message 0 of row 1"):
        ChatFormat(tokenizer).prompt_text(prompt, "row 1")


def test_fields_that_tables_fill_with_none_are_left_out() -> None:
    call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}]
    read = read_messages(call, "a row")
    function = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert read == [{"role": "assistant", "content": "", "tool_calls": [function]}]
    assert read_messages(np.array(USER, dtype=object), "a row") == USER


@pytest.mark.parametrize(
    ("mode", "limit", "expected"),
    [
        ("left", 3, [2, 3, 4]),
        ("right", 3, [0, 1, 2]),
        ("middle", 3, [0, 3, 4]),
        ("middle", 4, [0, 1, 3, 4]),
        ("middle", 1, [4]),
        ("left", 5, [0, 1, 2, 3, 4]),
        ("error", 9, [0, 1, 2, 3, 4]),
    ],
)
def test_truncation(mode: str, limit: int, expected: list[int]) -> None:
    assert truncate([0, 1, 2, 3, 4], limit, mode) == expected


def test_a_saved_tokenizer_loads_with_padding_and_template(new_tokenizer: Callable, tmp_path: Path) -> None:
    new_tokenizer(pad=False).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == 1
    (tmp_path / "my.jinja").write_text("{{ messages[0].content }}!")
    mine = load_tokenizer(str(tmp_path), chat_template=tmp_path / "my.jinja")
    assert ChatFormat(mine).prompt_text(USER)[1] == "hi!"
    with pytest.raises(ConfigError, match="data.chat_template"):
        load_tokenizer(tmp_path, chat_template=tmp_path / "missing.jinja")


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_neither_padding_nor_end_token_is_refused(new_tokenizer: Callable, tmp_path: Path) -> None:
    tokenizer = new_tokenizer(pad=False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="neither a padding nor an end-of-sequence"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_loaded_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model.path: no tokenizer.*'some/id'.*set model.path to a folder"):
        load_tokenizer("some/id", key="model.path")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"Download its files again") as caught:
        load_tokenizer(tmp_path)
    assert ".." not in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_its_model_is_noticed(
    tiny_tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_vocabulary(tiny_tokenizer, None)
    warn_of_vocabulary(tiny_tokenizer, len(tiny_tokenizer))
    assert not caplog.records
    warn_of_vocabulary(tiny_tokenizer, len(tiny_tokenizer) - 1)
    last = len(tiny_tokenizer) - 1
    assert f"ids up to {last}, the model's vocab_size is {last}" in caplog.text


def test_a_conversation_in_another_form_is_recognised(tiny_tokenizer) -> None:
    given, _ = ChatFormat(tiny_tokenizer).prompt_text([{"from": "human", "value": "hi"}])
    assert given == [{"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=r"right column \(data.prompt_key\)"):
        ChatFormat(tiny_tokenizer).prompt_text(5)
