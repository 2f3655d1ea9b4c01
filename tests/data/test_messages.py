"""The forms in which files have conversations, through every command that reads them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.agents.chat_tokenizers import chat_tokenizer
from verl.config.schema import DataConfig, PreferenceDataConfig, RewardDataConfig, SFTDataConfig
from verl.data.chat import ChatFormat
from verl.data.files import Rows, read_rows
from verl.data.messages import after_prompt, is_conversation, read_messages
from verl.data.offline_dataset import SFTDataset
from verl.data.preference_dataset import PreferenceDataset, RewardDataset
from verl.data.prepare.recipes import preference, sft_chat
from verl.data.rl_dataset import RLDataset
from verl.errors import DataError

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "hi 'you'"}
ANSWER: Message = {"role": "assistant", "content": 'a\n"b"'}
TALK = [USER, ANSWER]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
CALLS: list[Message] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]


def changed_call(**function: Any) -> list[Message]:
    call = {**CALL, "function": {**CALL["function"], **function}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call], "name": None}, CALLS[2]]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (TALK, TALK),
        (tuple(TALK), TALK),
        (np.array(TALK, dtype=object), TALK),
        (ANSWER, [ANSWER]),
        (json.dumps(ANSWER), [ANSWER]),
        (json.dumps(TALK), TALK),
        (json.dumps(TALK, indent=2), TALK),
        (json.dumps([{"name": None, **USER}]), [USER]),
        (str(TALK), TALK),
        (str(np.array(TALK, dtype=object)), TALK),
        (str([{**USER, "name": None}]), [USER]),
        ([{**USER, "name": None, "tool_calls": None}], [USER]),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "'you'"}],
                }
            ],
            [USER],
        ),
        ([{"role": "user", "content": [{"text": "hi 'you'", "type": "text", "image": None}]}], [USER]),
        ([{"from": "human", "value": "hi 'you'"}, {"from": "gpt", "value": 'a\n"b"'}], TALK),
        (CALLS, CALLS),
        (changed_call(arguments='{"city": "Rome"}'), CALLS),
        (changed_call(arguments={"city": "Rome", "zip": None}), CALLS),
        ([{**ANSWER, "reasoning_content": "why"}], [{**ANSWER, "reasoning_content": "why"}]),
    ],
)
def test_forms_of_messages(value: Any, wanted: list[Message]) -> None:
    assert is_conversation(value)
    assert read_messages(value, "a row") == wanted


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "",
        "hi",
        "[1] What is it?",
        '{"role": "engineer", "name": "Ada"}',
        '{"role": "engineer", "content": "x"}',
        '[{"from": "Rome", "to": "Oslo"}]',
        "[{'a': 1}]",
        '{"answer": 3}',
        '{"role": "user", "content": broken',
        [],
        {},
        ["hi"],
        [{"content": "x"}],
        [{"role": ["user", "user"], "content": ["a", "b"]}],
    ],
)
def test_what_does_not_look_like_messages(value: Any) -> None:
    assert not is_conversation(value)
    assert read_messages(value, "a row") is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            '[{"role": "user", "content": "hi"}',
            r"row 3 looks like messages, but is neither JSON \(.*Python text",
        ),
        ("[{'role': 'user', 'content': __import__('os')}]", "looks like messages"),
        ("[{'role': 'user', 'content': 'hi'}] + [1]", "looks like messages"),
        ([USER, "hi"], "Message 1 of row 3 is a str"),
        ([{"role": "user"}], "message 0 of row 3 has neither 'content' nor 'tool_calls'"),
        ([USER, {"role": 1, "content": "x"}], "message 1 of row 3 has no 'role', or one that is no text"),
        ([{"role": "user", "content": 4}], "content of message 0 of row 3 must be a text .*got int: '4'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "a part of type 'image_url'",
        ),
        ([{"role": "user", "content": ["hi"]}], "a part of type 'str'"),
        ([{"from": "alien", "value": "x"}], "message 0 of row 3 is of an unknown speaker 'alien'"),
        (changed_call(arguments="{broken"), "'arguments' of the call of 'f' in message 1 of row 3"),
    ],
)
def test_what_looks_like_messages_and_is_none_is_refused_with_its_row(value: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_messages(value, "row 3")


# -- every command


def sft_text(tokenizer: Any, row: dict[str, Any]) -> str:
    config = SFTDataConfig(train_files=["unused"], max_length=10_000)
    return tokenizer.decode(SFTDataset(config, Rows.from_list([row]), tokenizer)[0].input_ids)


def pair_text(tokenizer: Any, row: dict[str, Any], kind: Any = PreferenceDataset) -> str:
    section = RewardDataConfig if kind is RewardDataset else PreferenceDataConfig
    config = section(train_files=["unused"], max_length=10_000)
    item = kind(config, Rows.from_list([row]), tokenizer)[0]
    return tokenizer.decode(item.rows[0][0]).removesuffix("\n<pad>")


def rl_text(tokenizer: Any, prompt: Any) -> str:
    config = DataConfig(train_files=["unused"], max_prompt_length=10_000)
    return RLDataset(config, Rows.from_list([{"prompt": prompt}]), tokenizer)[0]["prompt_text"]


@pytest.mark.parametrize("form", [list, json.dumps, str, lambda value: str(np.array(value, dtype=object))])
@pytest.mark.parametrize("before", [[USER], CALLS], ids=["question", "calls"])
def test_every_command_reads_a_prompt_as_the_same_text(
    tokenizer: Any, form: Any, before: list[Message]
) -> None:
    """The template of the tokenizer writes no calls: they become text."""
    prompt, answer = form(before), ANSWER["content"]
    wanted = sft_text(tokenizer, {"messages": [*before, ANSWER]})
    assert ("<tool_call>" in wanted) == (before is CALLS)
    assert sft_text(tokenizer, {"prompt": prompt, "response": answer}) == wanted
    assert sft_text(tokenizer, {"messages": form([*before, ANSWER])}) == wanted
    row = {"prompt": prompt, "chosen": answer, "rejected": "bad"}
    assert pair_text(tokenizer, row) == pair_text(tokenizer, row, RewardDataset) == wanted
    whole = {"chosen": form([*before, ANSWER]), "rejected": form([*before, {**ANSWER, "content": "bad"}])}
    assert pair_text(tokenizer, whole) == pair_text(tokenizer, whole, RewardDataset) == wanted
    assert pair_text(tokenizer, {**whole, "prompt": prompt}) == wanted
    assert wanted == rl_text(tokenizer, prompt) + answer + "<|im_end|>"
    prepared = sft_chat({"prompt": prompt, "response": answer}, 0, "train")
    assert prepared is not None and sft_text(tokenizer, prepared) == wanted
    prepared = preference(row, 0, "train")
    assert prepared is not None and pair_text(tokenizer, prepared) == wanted


@pytest.mark.parametrize(
    "answer", [ANSWER, [ANSWER], json.dumps(ANSWER), json.dumps([ANSWER]), str([ANSWER])]
)
def test_an_answer_that_is_a_message_is_its_text(tokenizer: Any, answer: Any) -> None:
    wanted = sft_text(tokenizer, {"messages": TALK})
    assert sft_text(tokenizer, {"prompt": [USER], "response": answer}) == wanted
    assert pair_text(tokenizer, {"prompt": [USER], "chosen": answer, "rejected": "bad"}) == wanted


def test_text_in_csv_and_parts_and_nulls_in_parquet(tokenizer: Any, tmp_path: Path) -> None:
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "response"])
        writer.writeheader()
        writer.writerow({"prompt": str(np.array([USER], dtype=object)), "response": ANSWER["content"]})
    rows = [{"messages": TALK}, {"messages": [*changed_call(), ANSWER]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[::-1]), tmp_path / "rows.parquet")
    wanted = [sft_text(tokenizer, row) for row in rows]
    assert sft_text(tokenizer, read_rows(tmp_path / "rows.csv")[0]) == wanted[0]
    assert [sft_text(tokenizer, row) for row in read_rows(tmp_path / "rows.parquet")] == wanted[::-1]


# -- prompts beside whole conversations

SYSTEM: Message = {"role": "system", "content": "Be brief."}
OTHER: Message = {"role": "user", "content": "other"}


@pytest.mark.parametrize(
    ("prompt", "answer", "before"),
    [
        ([USER], [ANSWER], [USER]),
        ([USER], TALK, [USER]),
        ([{**USER, "content": USER["content"] + " "}], TALK, [USER]),
        ([USER], [SYSTEM, *TALK], [SYSTEM, USER]),
        ([SYSTEM, USER], TALK, [SYSTEM, USER]),
        ([SYSTEM, USER], [SYSTEM, *TALK], [SYSTEM, USER]),
        ([USER], [OTHER, ANSWER, *TALK], [OTHER, ANSWER, USER]),
        (TALK, [OTHER, ANSWER], TALK),
    ],
)
def test_a_conversation_that_repeats_the_prompt(prompt: Any, answer: Any, before: Any) -> None:
    found, following = after_prompt(prompt, answer, "row 3")
    assert found == before
    assert following == ([OTHER, ANSWER] if prompt == TALK else [ANSWER])


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([OTHER], TALK),
        ([SYSTEM, USER], [{**SYSTEM, "content": "Be long."}, *TALK]),
        ([USER], [SYSTEM, ANSWER]),
    ],
)
def test_a_conversation_in_which_the_prompt_is_not_is_refused(prompt: Any, answer: Any) -> None:
    with pytest.raises(DataError, match="row 3 is a conversation in which the prompt is not"):
        after_prompt(prompt, answer, "row 3")


def test_answers_in_a_row_that_conversations_share_are_turns_of_their_own(tokenizer: Any) -> None:
    whole = {"chosen": [USER, ANSWER, ANSWER], "rejected": [USER, ANSWER, {**ANSWER, "content": "bad"}]}
    assert pair_text(tokenizer, whole) == sft_text(tokenizer, {"messages": whole["chosen"]})


def test_a_string_prompt_beside_whole_conversations(tokenizer: Any) -> None:
    whole = {"chosen": TALK, "rejected": [USER, {**ANSWER, "content": "bad"}]}
    wanted = pair_text(tokenizer, whole)
    assert pair_text(tokenizer, {**whole, "prompt": USER["content"] + "\n"}) == wanted
    prepared = preference({**whole, "prompt": USER["content"], "system": "Be brief."}, 0, "train")
    assert prepared is not None and prepared["prompt"] == [SYSTEM, USER]
    with pytest.raises(DataError, match="'chosen' of row 0 .* in which the prompt is not"):
        pair_text(tokenizer, {**whole, "prompt": "other"})
    with pytest.raises(DataError, match="follow different conversations"):
        pair_text(tokenizer, {**whole, "prompt": USER["content"], "chosen": [SYSTEM, *TALK]})


# -- answers


def learned(tokenizer: Any, row: dict[str, Any]) -> str:
    config = SFTDataConfig(train_files=["unused"], max_length=10_000)
    item = SFTDataset(config, Rows.from_list([row]), tokenizer)[0]
    return tokenizer.decode(item.input_ids[item.response_mask.astype(bool)])


def test_the_end_of_a_turn_is_the_template_s(new_tokenizer: Any) -> None:
    tokenizer = new_tokenizer()
    tokenizer.eos_token = "<bos>"  # as Gemma and base models have another end of text
    row = {"prompt": [USER], "response": "r"}
    assert learned(tokenizer, {"messages": [USER, {**ANSWER, "content": "r"}]}) == "r<|im_end|>"
    assert learned(tokenizer, row) == "r<|im_end|>"
    assert learned(tokenizer, {**row, "response": "r<|im_end|>\n"}) == "r<|im_end|>"
    assert pair_text(tokenizer, {"prompt": [USER], "chosen": "r", "rejected": "x"}).endswith("\nr<|im_end|>")
    assert learned(tokenizer, {**row, "prompt": "q"}) == "r<bos>"
    # A string is no template's: what the response says stays.
    assert learned(tokenizer, {"prompt": "q", "response": "r<|im_end|>"}) == "r<|im_end|><bos>"
    config = SFTDataConfig(train_files=["unused"], max_length=100, parse_special_tokens=True)
    parsed = SFTDataset(config, Rows.from_list([{"prompt": "q", "response": "r<|im_end|>"}]), tokenizer)[0]
    assert tokenizer.decode(parsed.input_ids) == "qr<|im_end|>"


def test_a_template_that_opens_the_thinking(new_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:<think>\n{% endif %}"
    )
    tokenizer = new_tokenizer(template=template)
    thought = "<think>\nwhy\n</think>\n\nso"
    for row in (
        {"messages": [USER, {**ANSWER, "content": thought}]},
        {"messages": [USER, {**ANSWER, "content": "so", "reasoning_content": "why"}]},
        {"prompt": [USER], "response": thought},
        {"prompt": "<|im_start|>user:hi<|im_end|><|im_start|>assistant:<think>\n", "response": thought},
        {"prompt": [USER], "response": thought.removeprefix("<think>\n")},
    ):
        assert learned(tokenizer, row) == "why\n</think>\n\nso<|im_end|>"
    assert not caplog.records
    assert learned(tokenizer, {"prompt": [USER], "response": "so"}) == "so<|im_end|>"
    assert "that of row 0 of the given rows, message 1 has no </think>" in caplog.text


def test_a_template_that_drops_thinking_does_not_drop_it_from_what_is_learned(new_tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    row = {"messages": [USER, {**ANSWER, "content": "<think>why</think>so"}, USER, ANSWER]}
    config = SFTDataConfig(train_files=["unused"], max_length=10_000)
    tokenizer = new_tokenizer(template=template)
    first, second = SFTDataset(config, Rows.from_list([row]), tokenizer)
    assert tokenizer.decode(first.input_ids).endswith("assistant:<think>why</think>so<|im_end|>")
    assert "why" not in tokenizer.decode(second.input_ids)


def test_a_template_without_an_end_of_turn(new_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = new_tokenizer(template=template + "{% if add_generation_prompt %}assistant: {% endif %}")
    assert learned(tokenizer, {"messages": [USER, ANSWER, USER, ANSWER]}) == 'a\n"b"\na\n"b"\n<|im_end|>'
    assert "ends answers with '\\n', which is no special token" in caplog.text


def test_answers_of_weight_0_are_context(tokenizer: Any) -> None:
    bad = {"role": "assistant", "content": "bad", "weight": 0}
    assert learned(tokenizer, {"messages": [USER, bad, USER, {**ANSWER, "weight": 1}]}) == 'a\n"b"<|im_end|>'
    with pytest.raises(DataError, match="no message of the assistant to learn from"):
        learned(tokenizer, {"messages": [USER, bad]})
    with pytest.raises(DataError, match=r"'weight' of message 1 of row 0 .* must be 0 .* or 1, got 0.5"):
        learned(tokenizer, {"messages": [USER, {**bad, "weight": 0.5}]})


def test_thinking_that_the_template_does_not_know_is_said(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learned(tokenizer, {"messages": [USER, {**ANSWER, "reasoning_content": "why"}]})
    assert "leaves out 'reasoning_content' of answers, for example of row 0" in caplog.text


def test_preparing_keeps_the_thinking_and_stores_arguments_as_text() -> None:
    thought = {**ANSWER, "reasoning_content": "why"}
    row = sft_chat({"messages": [*CALLS, thought]}, 0, "train")
    assert row is not None and row["messages"][-1] == thought
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


def test_prompts_of_rollouts_and_rewards_have_calls_as_the_template_takes_them(tokenizer: Any) -> None:
    raw, text = ChatFormat(tokenizer).prompt_text(changed_call(arguments='{"city": "Rome"}'), "a row")
    assert isinstance(raw, list) and [message["role"] for message in raw] == ["user", "assistant", "user"]
    assert '{"name": "f", "arguments": {"city": "Rome"}}' in text
    for other in (tokenizer, chat_tokenizer("qwen2_5")):
        plain = ChatFormat(other, apply_chat_template="never").prompt_text(CALLS, "a row")[1]
        assert '"arguments": {"city": "Rome"}' in plain


def test_a_template_that_refuses_a_row_of_a_reward_model_names_it(new_tokenizer: Any) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    row = {"prompt": [SYSTEM, USER], "chosen": "a", "rejected": "b"}
    with pytest.raises(
        DataError, match=r"data.train_files: .*refuses row 0 of the given rows: no system role"
    ):
        pair_text(new_tokenizer(template=template), row, RewardDataset)


def test_a_reward_model_reads_conversations_as_it_does_when_it_scores(tokenizer: Any) -> None:
    row = {"prompt": [USER], "chosen": "a<|im_end|>b", "rejected": "c"}
    config = RewardDataConfig(train_files=["unused"], max_length=10_000, parse_special_tokens=True)
    (ids, _), _ = RewardDataset(config, Rows.from_list([row]), tokenizer)[0].rows
    scored = ChatFormat(tokenizer).conversation_ids([USER, {"role": "assistant", "content": row["chosen"]}])
    assert ids.tolist()[:-1] == scored
