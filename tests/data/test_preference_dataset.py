"""Preference pairs: both answers behind the same prompt, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from verl.config.schema import DPODataConfig, RewardDataConfig
from verl.data.chat import ChatFormat
from verl.data.files import Rows
from verl.data.loader import Loader
from verl.data.preference_dataset import LabelledDataset, PreferenceDataset, RewardDataset, StepDataset
from verl.errors import DataError


def build(
    tokenizer: Any, *rows: dict[str, Any], kind: Any = PreferenceDataset, **changes: Any
) -> PreferenceDataset:
    section: Any = RewardDataConfig if kind in (RewardDataset, StepDataset) else DPODataConfig
    return kind(section(**{"shuffle": False, **changes}), Rows.from_list(rows), tokenizer)


def learned(tokenizer: Any, side: Any) -> tuple[str, str]:
    ids, mask = side
    text = tokenizer.decode([token for token, m in zip(ids.tolist(), mask.tolist(), strict=True) if m])
    return tokenizer.decode(ids.tolist()), text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


HEADER = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HEADER, "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [answer("good")], "rejected": [answer("bad")]},
        {"chosen": [user("q"), answer("good")], "rejected": [user("q"), answer("bad")]},
    ],
)
def test_every_form_gives_the_same_pair(tokenizer: Any, row: dict) -> None:
    item = build(tokenizer, row)[0]
    assert learned(tokenizer, item.rows[0]) == (HEADER + "good<|im_end|>", "good<|im_end|>")
    assert learned(tokenizer, item.rows[1]) == (HEADER + "bad<|im_end|>", "bad<|im_end|>")


def test_only_what_differs_is_learned_from(tokenizer: Any) -> None:
    shared = [user("q"), answer("first"), user("more")]
    item = build(tokenizer, {"chosen": [*shared, answer("good")], "rejected": [*shared, answer("bad")]})[0]
    assert learned(tokenizer, item.rows[0])[1] == "good<|im_end|>"
    longer = build(
        tokenizer,
        {"prompt": shared, "chosen": [answer("a"), user("b"), answer("c")], "rejected": "bad"},
    )[0]
    assert learned(tokenizer, longer.rows[0])[1] == "a<|im_end|>c<|im_end|>"


def test_collated_pairs_stay_together(tokenizer: Any) -> None:
    dataset = build(
        tokenizer,
        {"prompt": "p", "chosen": "x", "rejected": "yyy"},
        {"prompt": "r", "chosen": "same", "rejected": "same"},
        {"prompt": "s", "chosen": "z", "rejected": "w"},
    )
    assert len(dataset) == 2
    batch = dataset.batch([0, 1], ["a", "b"])
    assert batch.meta_info["rows_together"] == 2
    assert batch.batch["chosen"].tolist() == [True, False, True, False]
    assert batch.non_tensor_batch["index"].tolist() == [0, 0, 2, 2]
    assert batch.batch["input_ids"].shape == (4, 5)
    assert batch.batch["response_mask"].tolist() == [
        [0, 1, 1, 0, 0],
        [0, 1, 1, 1, 1],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
    ]
    (loaded,) = list(Loader(dataset, 2))
    assert loaded.non_tensor_batch["uid"].tolist() == ["0-0", "0-0", "0-2", "0-2"]


def test_long_pairs(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "0123", "chosen": "4567", "rejected": "4"}
    with pytest.raises(
        DataError, match=r"1 of 1 pairs are longer than data.max_length=8 .*data.max_length=9"
    ):
        build(tokenizer, row, max_length=8)
    with caplog.at_level(logging.WARNING):
        item = build(tokenizer, row, max_length=6, truncation="left")[0]
    assert learned(tokenizer, item.rows[0])[0] == "34567<|im_end|>" and "1 of 1 pairs are cut" in caplog.text
    with pytest.raises(DataError, match="no usable pair"):
        build(tokenizer, row, max_length=4, truncation="right")


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_a_cut_conversation_still_asks_for_its_reward(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, truncation: str
) -> None:
    """Also where its end is cut off; pairs that differ only there are equal then."""
    rows = [{"prompt": "0", "chosen": chosen, "rejected": "1" * 20} for chosen in ("2" * 20, "1" * 19 + "2")]
    whole = [item.rows[0][0][:-1].tolist() for item in build(tokenizer, *rows, kind=RewardDataset).items]
    kept = len(whole[0]) - 5
    dataset = build(tokenizer, *rows, kind=RewardDataset, max_length=kept + 1, truncation=truncation)
    ids, mask = dataset[0].rows[0]
    assert mask.tolist() == [0] * kept + [1] and ids[-1] == tokenizer.pad_token_id
    if truncation == "right":
        assert ids[:-1].tolist() == whole[0][:kept]
        assert len(dataset) == 1 and "1 of 2 pairs have two equal answers when cut" in caplog.text
    if truncation == "left":
        assert ids[:-1].tolist() == whole[0][-kept:] and len(dataset) == 2
    assert "keep nothing of an answer" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "cut", "pairs"),
    [
        (
            PreferenceDataset,
            {"max_length": 6, "truncation": "right"},
            [("123456", "123457"), ("123456", "223456")],
        ),
        (
            RewardDataset,
            {"max_length": 9, "truncation": "left"},
            [("0123456789", "1123456789"), ("01", "02")],
        ),
    ],
)
def test_pairs_that_are_equal_once_they_are_cut(
    kind: Any, cut: dict, pairs: list, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "0", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    dataset = build(tokenizer, *rows, kind=kind, **cut)
    assert [item.index for item in dataset.items] == [1]
    assert "1 of 2 pairs have two equal answers when cut and are left out" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "c"}, "no column 'rejected'"),
        ({"prompt": "p", "chosen": 3, "rejected": "r"}, "'chosen' of row 0 .* must be a text or messages"),
        ({"chosen": "c", "rejected": "r"}, "has no prompt"),
        (
            {"chosen": [user("a"), answer("x")], "rejected": [user("b"), answer("y")]},
            "do not start with the same",
        ),
        (
            {"prompt": "p", "chosen": [answer("x"), user("y"), answer("z")], "rejected": "r"},
            "must be messages too",
        ),
        ({"prompt": "p", "chosen": "c", "rejected": "c"}, "all 1 pairs have two equal answers"),
        ({"prompt": "p", "chosen": "c\ud800", "rejected": "c"}, "row 0 of .* holds half of a surrogate pair"),
    ],
)
def test_rows_that_cannot_be_used(tokenizer: Any, row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, row)


def test_half_of_a_surrogate_pair_for_a_reward_model(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="row 0 of .* holds half of a surrogate pair"):
        build(tokenizer, {"prompt": "p\ud800", "chosen": "c", "rejected": "d"}, kind=RewardDataset)


def test_a_string_prompt_before_messages(new_tokenizer: Callable) -> None:
    row = {"prompt": "p", "chosen": [answer("x"), user("y"), answer("z")], "rejected": "r"}
    (item,) = build(new_tokenizer(), row, apply_chat_template="always").items
    assert learned(new_tokenizer(), item.rows[0])[0].startswith("<|im_start|>user\np<|im_end|>")
    with pytest.raises(
        DataError, match="conversation, which needs the chat template: data.apply_chat_template=never"
    ):
        build(new_tokenizer(), {**row, "prompt": [user("p")]}, apply_chat_template="never")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": HEADER, "completion": "good"},
        {"prompt": [user("q")], "completion": "good"},
        {"prompt": [user("q")], "completion": [answer("good")]},
        {"prompt": [user("q")], "completion": [user("q"), answer("good")]},
    ],
)
def test_every_form_gives_the_same_labelled_answer(tokenizer: Any, row: dict) -> None:
    other = {"prompt": "p", "completion": "x", "label": False}
    items = build(tokenizer, {**row, "label": True}, other, kind=LabelledDataset).items
    assert [item.label for item in items] == [True, False]
    assert learned(tokenizer, items[0].rows[0]) == (HEADER + "good<|im_end|>", "good<|im_end|>")
    assert learned(tokenizer, items[0].rows[1]) == (HEADER + "x<|im_end|>", "x<|im_end|>")
    assert learned(tokenizer, items[1].rows[1]) == ("pgood<|im_end|>", "good<|im_end|>")


def test_the_second_row_of_an_answer_is_its_prompt_with_an_answer_to_another_prompt(tokenizer: Any) -> None:
    """Also where answers to one prompt follow each other; all answers of the next prompt take their turn."""
    given = [("aa", "1"), ("aa", "2"), ("b", "3"), ("aa", "4"), ("b", "5"), ("c", "6")]
    rows = [{"prompt": p, "completion": c, "label": n % 2 == 0} for n, (p, c) in enumerate(given)]
    dataset = build(tokenizer, *rows, kind=LabelledDataset)
    written = [learned(tokenizer, item.rows[1])[0].removesuffix("<|im_end|>") for item in dataset.items]
    assert written == ["aa3", "aa5", "b6", "aa3", "b6", "c1"]
    batch = dataset.batch([0, 3], ["x", "y"])
    assert batch.meta_info["rows_together"] == 2
    assert batch.batch["mismatched"].tolist() == [False, True] * 2
    assert batch.batch["chosen"].tolist() == [True, True, False, False]
    assert batch.non_tensor_batch["index"].tolist() == [0, 0, 3, 3]
    with pytest.raises(
        DataError, match="data.train_files: all answers are to one prompt; algorithm.loss=kto"
    ):
        build(tokenizer, *rows[:2], kind=LabelledDataset)


def test_a_pair_is_two_labelled_answers(tokenizer: Any) -> None:
    rows = [{"prompt": p, "chosen": f"{p}+", "rejected": f"{p}-"} for p in ("a", "b")]
    dataset = build(tokenizer, *rows, {**rows[0], "rejected": "a+"}, kind=LabelledDataset)
    assert [(learned(tokenizer, item.rows[0])[0], item.label, item.index) for item in dataset.items] == [
        ("aa+<|im_end|>", True, 0),
        ("aa-<|im_end|>", False, 0),
        ("bb+<|im_end|>", True, 1),
        ("bb-<|im_end|>", False, 1),
    ]
    assert [learned(tokenizer, item.rows[1])[0][:3] for item in dataset.items] == ["ab+", "ab-", "ba+", "ba-"]


@pytest.mark.parametrize(
    ("given", "read"), [(1, True), (0, False), ("True", True), (" false ", False), (1.0, True), ("0", False)]
)
def test_labels(tokenizer: Any, given: Any, read: bool) -> None:
    rows = [{"prompt": p, "completion": "x", "label": given} for p in "ab"]
    assert [item.label for item in build(tokenizer, *rows, kind=LabelledDataset).items] == [read, read]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"label": "good"},
            r"data.train_files: 'label' \(data.label_key\) of row 1 .* is 'good'; it must be true",
        ),
        ({"label": None}, "'label' .* of row 1 .* is None"),
        ({"label": 0.5}, "'label' .* of row 1 .* is 0.5"),
        ({"completion": 3}, "data.train_files: 'completion' of row 1 .* must be a text or messages, got int"),
        ({"prompt": None}, "data.train_files: .*row 1"),
        ({"completion": "x" * 99}, "1 of 2 answers are longer than data.max_length=64 tokens"),
    ],
)
def test_labelled_rows_that_cannot_be_used(tokenizer: Any, change: dict, message: str) -> None:
    rows = [{"prompt": p, "completion": "x", "label": True} for p in "ab"]
    with pytest.raises(DataError, match=message):
        build(tokenizer, rows[0], {**rows[1], **change}, kind=LabelledDataset, max_length=64)


@pytest.mark.parametrize("missing", ["prompt", "completion", "label"])
def test_the_columns_of_labelled_rows(tokenizer: Any, missing: str) -> None:
    row = {"prompt": "p", "completion": "x", "label": True}
    del row[missing]
    with pytest.raises(DataError, match=rf"no column '{missing}' \(data.{missing}_key\)"):
        build(tokenizer, row, kind=LabelledDataset)


def test_rows_of_a_reward_model_are_read_as_it_reads_them_later(tokenizer: Any) -> None:
    rows = [
        {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 2},
        {"prompt": [user("q")], "chosen": [answer("good")], "rejected": "bad", "margin": 0.5},
    ]
    dataset = build(tokenizer, *rows, kind=RewardDataset)
    wanted = ChatFormat(tokenizer).conversation_ids([user("q"), answer("good")])
    for item in dataset.items:
        ids, mask = item.rows[0]
        assert ids.tolist()[:-1] == wanted
        assert mask.tolist() == [0] * len(wanted) + [1]
    batch = dataset.batch([0, 1], ["x", "y"])
    assert batch.batch["margin"].tolist() == [2.0, 2.0, 0.5, 0.5]


@pytest.mark.parametrize(("given", "read"), [(None, 0.0), ("", 0.0), ("1.5", 1.5), (" -2 ", -2.0), (3, 3.0)])
def test_margins(tokenizer: Any, given: Any, read: float) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": given}
    assert build(tokenizer, row, kind=RewardDataset)[0].margin == read


@pytest.mark.parametrize("given", ["much", "nan", True, float("inf"), [1.0]])
def test_margins_that_are_no_numbers_are_refused_by_row(tokenizer: Any, given: Any) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": given}
    with pytest.raises(DataError, match=r"'margin' \(data.margin_key\) of row 0 .* must be a finite number"):
        build(tokenizer, row, kind=RewardDataset)


def test_known_reference_log_probs_come_with_the_rows(tokenizer: Any) -> None:
    dataset = build(tokenizer, *({"prompt": "p", "chosen": c, "rejected": "no"} for c in "abc"))
    dataset.reference = np.arange(6.0).reshape(3, 2)
    assert dataset.batch([2, 0], ["x", "y"]).batch["ref_log_prob"].tolist() == [4.0, 5.0, 0.0, 1.0]


STEPS = {"prompt": "q", "completions": ["zy", "c", "def"], "labels": [True, 0.25, False]}


@pytest.mark.parametrize(("prompt", "written"), [("q", "q"), ([user("q")], HEADER)])
def test_the_value_of_a_steps_last_token_is_asked_for_by_the_token_behind_it(
    tokenizer: Any, prompt: Any, written: str
) -> None:
    (item,) = build(tokenizer, {**STEPS, "prompt": prompt}, kind=StepDataset).items
    ids, mask = item.rows[0]
    assert tokenizer.decode(ids[:-1].tolist()) == f"{written}zy\nc\ndef\n"
    ends = [tokenizer.decode(ids[: at + 1].tolist()).removeprefix(written) for at in np.flatnonzero(mask) - 1]
    assert ends == ["zy\n", "zy\nc\n", "zy\nc\ndef\n"]
    assert item.step_labels is not None
    assert item.step_labels[np.flatnonzero(mask) - 1].tolist() == [1.0, 0.25, 0.0]
    assert (item.step_labels < 0).sum() == len(ids) - 1 - len("zy\nc\ndef\n")


def test_steps_with_a_separator_of_several_tokens(tokenizer: Any) -> None:
    ids, mask = build(tokenizer, STEPS, kind=StepDataset, step_separator=" ##")[0].rows[0]
    assert tokenizer.decode(ids[:-1].tolist()) == "qzy ##c ##def ##"
    assert np.flatnonzero(mask).tolist() == [6, 10, 16]


@pytest.mark.parametrize(
    ("how", "left", "labels"),
    [
        ("left", "\nc\ndef\n", [1.0, 0.25, 0.0]),
        ("right", "qzy\nc\nde", [1.0, 0.25]),
        ("middle", "qzy\ndef\n", [1.0, 0.0]),
    ],
)
def test_a_step_whose_end_is_cut_off_is_not_learned(
    tokenizer: Any, how: str, left: str, labels: list[float]
) -> None:
    size = len(left) + 1
    item = build(tokenizer, STEPS, kind=StepDataset, max_length=size, truncation=how)[0]
    ids, mask = item.rows[0]
    assert tokenizer.decode(ids[: len(left)].tolist()) == left
    assert item.step_labels is not None
    assert item.step_labels[np.flatnonzero(mask) - 1].tolist() == labels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": [True]},
            r"data.train_files: 'labels' \(data.labels_key\) of row 0 .* for each of its 3 steps",
        ),
        (
            {"labels": [True, 2, False]},
            "'labels' .* of row 0 .* must be a list of true or false, or numbers from",
        ),
        ({"labels": [True, "no", False]}, "'labels' .* of row 0"),
        ({"labels": None}, "'labels' .* of row 0"),
        (
            {"completions": "ab"},
            r"'completions' \(data.completions_key\) of row 0 .* must be a list of texts",
        ),
        ({"completions": []}, "'completions' .* of row 0"),
        ({"completions": ["a", 1, "b"]}, "'completions' .* of row 0"),
        ({"prompt": None}, "data.train_files: .*row 0"),
    ],
)
def test_steps_that_cannot_be_used(tokenizer: Any, change: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tokenizer, {**STEPS, **change}, kind=StepDataset)
