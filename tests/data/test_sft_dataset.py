"""Fine-tuning rows: what is seen, what is learned from, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.config.schema import SFTDataConfig
from verl.data.chat import ChatFormat
from verl.data.files import Rows
from verl.data.offline_dataset import SFTDataset, sft_collate
from verl.errors import DataError, ModelError


def config(**changes: Any) -> SFTDataConfig:
    return SFTDataConfig(**{"train_files": ["unused"], "train_batch_size": 2, "max_length": 200, **changes})


def build(tokenizer: Any, *rows: dict[str, Any], **changes: Any) -> SFTDataset:
    return SFTDataset(config(**changes), Rows.from_list(rows), tokenizer)


def split(tokenizer: Any, item: Any) -> tuple[str, str]:
    """The whole text of an item and the text it is learned from."""
    ids = item.input_ids.tolist()
    learned = [token for token, m in zip(ids, item.response_mask.tolist(), strict=True) if m]
    return tokenizer.decode(ids), tokenizer.decode(learned)


def chat(*turns: str) -> list[dict[str, str]]:
    """Roles by the first letter of a turn: s, u, a."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def test_prompt_and_response_strings(tokenizer: Any) -> None:
    item = build(tokenizer, {"prompt": "2+2=", "response": "4"})[0]
    assert split(tokenizer, item) == ("2+2=4<|im_end|>", "4<|im_end|>")


def test_an_end_token_that_is_there_is_not_doubled(tokenizer: Any) -> None:
    assert (
        split(tokenizer, build(tokenizer, {"prompt": "q", "response": "4<|im_end|>"})[0])[1] == "4<|im_end|>"
    )


def test_texts_inside_another_column(tokenizer: Any) -> None:
    info = {"question": "2+2=", "solution": {"answer": "4"}}
    keys = {
        "prompt_key": "info",
        "prompt_dict_keys": ["question"],
        "response_key": "info",
        "response_dict_keys": ["solution", "answer"],
    }
    plain = build(tokenizer, {"prompt": "2+2=", "response": "4"})[0]
    for given in (info, json.dumps(info)):
        assert build(tokenizer, {"info": given}, **keys)[0].input_ids.tolist() == plain.input_ids.tolist()
    with pytest.raises(DataError, match=r"'info' of .*row 1.* has no 'answer'"):
        build(tokenizer, {"info": info}, {"info": {"question": "q", "solution": {}}}, **keys)


def test_prompt_messages_are_templated(tokenizer: Any) -> None:
    item = build(tokenizer, {"prompt": chat("uhi"), "response": "yo"})[0]
    assert split(tokenizer, item) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>",
        "yo<|im_end|>",
    )
    as_message = build(tokenizer, {"prompt": chat("uhi"), "response": chat("ayo")})[0]
    assert as_message.input_ids.tolist() == item.input_ids.tolist()


def test_the_prompt_is_encoded_as_in_a_rollout(new_tokenizer: Callable) -> None:
    """'a' before 'b' is one token when encoded together, but the policy is prompted with 'a' alone."""
    tokenizer = new_tokenizer(bos=True)
    item = build(tokenizer, {"prompt": "a", "response": "b"})[0]
    prompt = ChatFormat(tokenizer).encode_prompts(["a"], ["a row"])[0][2]
    assert item.input_ids.tolist()[: len(prompt)] == prompt and tokenizer.decode(prompt) == "<bos>a"
    assert item.response_mask.tolist() == [0, 0, 1, 1]


def test_conversations_learn_from_every_answer_and_its_end_only(tokenizer: Any) -> None:
    turns = chat("sbe nice", "uhi", "ahello", "ubye", "aciao")
    item = build(tokenizer, {"messages": turns})[0]
    whole, learned = split(tokenizer, item)
    # The newline a template writes after the last answer is never generated, nor needed.
    assert whole + "\n" == tokenizer.apply_chat_template(turns, tokenize=False)
    assert learned == "hello<|im_end|>ciao<|im_end|>"


def test_a_question_after_the_last_answer_is_not_needed(tokenizer: Any) -> None:
    item = build(tokenizer, {"messages": chat("uhi", "ahello", "uthanks")})[0]
    assert split(tokenizer, item)[1] == "hello<|im_end|>" and "thanks" not in split(tokenizer, item)[0]


def test_system_prompt_in_conversations(tokenizer: Any) -> None:
    item = build(tokenizer, {"messages": chat("uhi", "ayo")}, system_prompt="S")[0]
    assert split(tokenizer, item)[0].startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi")
    assert split(tokenizer, item)[1] == "yo<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_gives_several_rows(
    new_tokenizer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    forgetting = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last or m.role == 'user' else '...' }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = new_tokenizer(template=forgetting)
    assert split(tokenizer, build(tokenizer, {"messages": chat("uhi", "ayo")})[0])[1] == "yo<|im_end|>"
    with caplog.at_level(logging.INFO):
        items = build(
            tokenizer, {"messages": chat("uhi", "ayo", "uhm", "aho")}, {"messages": chat("uhi", "ayo")}
        )
    assert [split(tokenizer, item) for item in items] == [
        ("[user]hi[assistant]yo<|im_end|>", "yo<|im_end|>"),
        ("[user]hi[assistant]...[user]hm[assistant]ho<|im_end|>", "ho<|im_end|>"),
        ("[user]hi[assistant]yo<|im_end|>", "yo<|im_end|>"),
    ]
    assert [items.row_number(position) for position in range(3)] == [0, 0, 1]
    assert "1 of 2 conversations are 2 rows" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "response": None},
            "'response' of row 0 .* must be a text or messages, got NoneType",
        ),
        ({"prompt": "q", "response": 4}, "must be a text or messages, got int"),
        ({"prompt": 3, "response": "r"}, "neither a string nor"),
        ({"messages": "text"}, "not a list of messages"),
        ({"messages": chat("uhi")}, "no message of the assistant"),
        ({"messages": chat("ahi", "uyo")}, "starts with the assistant"),
        ({"question": "q", "answer": "r"}, "no column 'prompt'.*data.prompt_key=question"),
        ({"prompt": "q\ud800", "response": "r"}, "row 0 of the given rows holds half of a surrogate pair"),
        ({"prompt": "q", "response": "r\udfff"}, "row 0 of the given rows holds half of a surrogate pair"),
        ({"prompt": "q", "answer": "r"}, "no column 'response'.*data.response_key=answer"),
    ],
)
def test_rows_that_cannot_be_used(tokenizer: Any, row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, row)


def test_messages_without_a_template(new_tokenizer: Callable) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        build(new_tokenizer(template=None), {"messages": chat("uhi", "ayo")})


def test_conversations_go_before_the_pair_of_columns(tokenizer: Any) -> None:
    row = {"prompt": "q", "response": "r", "messages": chat("uhi", "ayo")}
    assert split(tokenizer, build(tokenizer, row)[0])[1] == "yo<|im_end|>"
    assert split(tokenizer, build(tokenizer, row, messages_key="none")[0])[0] == "qr<|im_end|>"


def test_other_column_names(tokenizer: Any) -> None:
    pair = build(tokenizer, {"question": "q", "answer": "r"}, prompt_key="question", response_key="answer")
    assert split(tokenizer, pair[0])[0] == "qr<|im_end|>"
    turns = build(tokenizer, {"conversations": chat("uhi", "ayo")}, messages_key="conversations")
    assert split(tokenizer, turns[0])[1] == "yo<|im_end|>"


def test_long_rows(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "0123", "response": "4567"}  # nine tokens with the end
    with pytest.raises(DataError, match=r"1 of 2 rows are longer.*row 1 .* has 9.*data.max_length=9"):
        build(tokenizer, {"prompt": "q", "response": "r"}, row, max_length=6)
    cut = {
        mode: split(tokenizer, build(tokenizer, row, max_length=6, truncation=mode)[0])
        for mode in ("left", "right", "middle")
    }
    assert cut == {
        "left": ("34567<|im_end|>", "4567<|im_end|>"),
        "right": ("012345", "45"),
        "middle": ("01267<|im_end|>", "67<|im_end|>"),
    }
    with caplog.at_level(logging.WARNING):
        left = build(tokenizer, row, {"prompt": "q", "response": "r"}, max_length=4, truncation="right")
    assert len(left) == 1 and left.row_number(0) == 1 and "nothing of their response remained" in caplog.text
    with pytest.raises(DataError, match="no row keeps a token"):
        build(tokenizer, row, max_length=4, truncation="right")


def test_the_first_token_is_never_learned_from(tokenizer: Any) -> None:
    item = build(tokenizer, {"prompt": "0123", "response": "4567"}, max_length=3, truncation="left")[0]
    assert item.response_mask.tolist() == [0, 1, 1]
    unprompted = build(tokenizer, {"prompt": "", "response": "xy"})[0]
    assert unprompted.response_mask.tolist() == [0, 1, 1]


def test_rows_with_an_empty_answer_are_counted(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    full = [{"prompt": "q", "response": "4"}, {"prompt": "q", "response": "a 4"}]
    assert len(build(tokenizer, *full, max_length=3, truncation="left")) == 2
    assert "empty answer" not in caplog.text
    assert (
        len(build(tokenizer, *full, {"prompt": "q", "response": ""}, {"prompt": "q", "response": " \n"})) == 4
    )
    assert "2 of 4 rows have an empty answer, of which only the end of the turn is learned" in caplog.text


def test_collating_pads_on_the_right(tokenizer: Any) -> None:
    dataset = build(tokenizer, {"prompt": "a", "response": "x"}, {"prompt": "c", "response": "xyz"})
    batch = sft_collate([dataset[0], dataset[1]], pad_id=77)
    assert batch.batch["input_ids"].shape == (2, 5)
    assert batch.batch["input_ids"][0, 3:].tolist() == [77, 77]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.batch["response_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.batch["response_mask"][:, 0].sum() == 0


def test_loaders(tokenizer: Any, tmp_path: Path, write_jsonl: Callable) -> None:
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "p", "response": str(i)} for i in range(5)])
    loader = SFTDataset.loader(config(train_files=[file], val_files=[file]), tokenizer)
    assert loader is not None and [len(batch) for batch in loader] == [2, 2, 1]
    val = SFTDataset.loader(config(train_files=[file], val_files=[file]), tokenizer, training=False)
    assert val is not None
    assert [batch.non_tensor_batch["index"].tolist() for batch in val] == [[0, 1], [2, 3], [4]]
    assert SFTDataset.loader(config(train_files=[file]), tokenizer, training=False) is None
    assert len(SFTDataset(config(train_max_samples=3), file, tokenizer)) == 3
