"""What is trained against what is generated, in ids, for the templates and tokenizers of the common families."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.families import FAMILIES, family
from verl.agents.templates import ChatTurns
from verl.config.schema import PreferenceDataConfig, SFTDataConfig
from verl.data.chat import ChatFormat
from verl.data.files import Rows
from verl.data.offline_dataset import SFTDataset
from verl.data.preference_dataset import PreferenceDataset

Message = dict[str, Any]
words = st.lists(
    st.sampled_from(
        [
            "the",
            "answer",
            " is",
            " 42",
            "7",
            "\n",
            "\n\n",
            "  ",
            "'s",
            "é",
            "日",
            "ans",
            "[",
            ". ",
            "a",
            "</",
            "s",
        ]
    ),
    min_size=1,
    max_size=6,
).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": "Q" + draw(words)})
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


def thinking(name: str, messages: list[Message]) -> list[Message]:
    """With thinking in the answers, where the family's header opens it."""
    if not family(name)[0].thinks:
        return messages
    return [
        {**message, "content": f"<think>\nwhy\n</think>\n\n{message['content']}"}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Of a conversation at inference."""
    return ChatFormat(tokenizer).encode_prompts([messages], ["a row"])[0][2]


def text_after(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    whole, start = tokenizer.decode(before + ids), tokenizer.decode(before)
    assert whole.startswith(start)
    return whole[len(start) :]


def learned(dataset: Any) -> list[tuple[list[int], list[int]]]:
    """The ids before each run of learned ids, and the run."""
    found = []
    for item in dataset:
        for input_ids, mask in item.rows if hasattr(item, "rows") else [(item.input_ids, item.response_mask)]:
            ids, marks = input_ids.tolist(), [*mask.tolist(), 0]
            starts = [at for at in range(1, len(ids)) if marks[at] and not marks[at - 1]]
            found += [(ids[:start], ids[start : marks.index(0, start)]) for start in starts]
    return found


def sft(tokenizer: Any, row: dict[str, Any]) -> SFTDataset:
    return SFTDataset(
        SFTDataConfig(train_files=["unused"], max_length=100_000), Rows.from_list([row]), tokenizer
    )


def dpo(tokenizer: Any, row: dict[str, Any]) -> PreferenceDataset:
    config = PreferenceDataConfig(train_files=["unused"], max_length=100_000)
    return PreferenceDataset(config, Rows.from_list([row]), tokenizer)


FIRST = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ans"}]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(messages=conversations())
@example(messages=FIRST * 2)
@example(messages=[FIRST[0], {"role": "assistant", "content": "\nans "}] * 2)
def test_the_context_of_each_answer_is_its_prompt_at_inference(name: str, messages: list[Message]) -> None:
    made, tokenizer = family(name)
    messages = thinking(name, messages)
    dataset = sft(tokenizer, {"messages": messages})
    parts = learned(dataset)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(parts) == len(answers)
    for (before, ids), number in zip(parts, answers, strict=True):
        assert before == prompt_ids(tokenizer, messages[:number])
        assert text_after(tokenizer, before, ids) == made.written(messages[number]["content"])
        assert ids[-1] == tokenizer.convert_tokens_to_ids((made.end or made.eos).strip())
    # A pair of prompt and answer is the same ids, in fine-tuning and in preference training.
    last = parts[-1]
    assert learned(sft(tokenizer, {"prompt": messages[:-1], "response": messages[-1]["content"]})) == [last]
    pair = {
        "prompt": messages[:-1],
        "chosen": messages[-1]["content"],
        "rejected": messages[-1:][0]["content"] + "x",
    }
    assert learned(dpo(tokenizer, pair))[0] == last


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_of_a_family_that_appends_is_one_row(name: str) -> None:
    made, tokenizer = family(name)
    assert (len(sft(tokenizer, {"messages": thinking(name, FIRST * 3)})) == 1) == made.appends


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(messages=conversations())
@example(messages=FIRST * 3)
def test_what_a_rollout_adds_between_turns_is_in_the_prompt_at_inference(
    name: str, messages: list[Message]
) -> None:
    made, tokenizer = family(name)
    if not made.appends:
        pytest.skip("its prompts of later turns do not begin with earlier ones")
    turns = ChatTurns(ChatFormat(tokenizer), tools=False, users=True, history="append")
    row = turns.prompt(messages[:1], [])
    one_row = len(sft(tokenizer, {"messages": messages})) == 1
    for number in range(1, len(messages) - 1, 2):
        (_, drawn), *_ = learned(sft(tokenizer, {"messages": messages[: number + 1]}))[::-1]
        after = turns.after(drawn, messages[number + 1 : number + 2])
        before, row = row + drawn[:-1], row + drawn + after
        whole = prompt_ids(tokenizer, messages[: number + 2])
        assert whole[len(whole) - len(after) :] == after
        if one_row:
            assert row == whole
        cut = turns.after(drawn[:-1], messages[number + 1 : number + 2])
        assert cut[len(cut) - len(after) :] == after
        assert text_after(tokenizer, before, cut).startswith(made.end or made.eos)
