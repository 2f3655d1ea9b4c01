"""GSM8K: tables of right and wrong answers, and every reference answer of the real files."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from verl.errors import RewardError
from verl.reward.scorers.gsm8k import compute_score, extract_answer
from verl.reward.scorers.text import first_number, last_number, to_decimal

LONG = "7" * 6000  # more digits than Python turns into an int


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("#### 42", "42"),
        ("so\n####42", "42.0"),
        ("#### 42.0", "42"),
        ("#### 42.", 42),
        ("#### $42", "42"),
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### $1,234.50", "1234.5"),
        ("#### −5", "-5"),
        ("#### -5 degrees", "-5"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("#### 1\u202f234\u202f567", "1234567"),
        ("#### １２", "12"),
        ("#### 42 apples", "42"),
        ("#### 50%", "50"),
        ("#### 1{,}000", "1000"),
        ("#### 7 is wrong\n#### 8", "8"),
        ("#### " + LONG, LONG),
        ("#### 72", "Natalia sold 48/2 = 24 clips.\n#### 72"),
        ("#### 1e3", "1000"),
        ("#### .5", "0.5"),
    ],
)
def test_right_answers(response, truth):
    assert compute_score(response, truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("42", "42"),
        ("The answer is 42", "42"),
        ("####", "42"),
        ("#### forty-two", "42"),
        ("#### 43", "42"),
        ("#### -42", "42"),
        ("#### 3,4", "34"),
        ("#### 1,23", "123"),
        ("#### 1.2.3", "1.2"),
        ("#### 42\n#### 43", "42"),
        ("#### " + LONG + "1", LONG),
        ("", "42"),
        ("#### 42 ####", "42"),
    ],
)
def test_wrong_answers(response, truth):
    assert compute_score(response, truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("The answer is 42.", "42", 1.0),
        ("10 - 5", "5", 1.0),
        ("10-5", "5", 1.0),
        ("from 3–5", "5", 1.0),
        ("It costs $1,234.", "1234", 1.0),
        ("x = −7", "-7", 1.0),
        ("#### unsure, maybe 9", "9", 1.0),
        ("42 or rather 43", "42", 0.0),
        ("no number", "42", 0.0),
    ],
)
def test_flexible_takes_the_last_number(response, truth, score):
    assert compute_score(response, truth, method="flexible")["score"] == score


def test_format_score_and_unknown_method_and_unreadable_truth():
    assert compute_score("#### 1", "2", format_score=0.1)["score"] == 0.1
    assert compute_score("none", "2", format_score=0.1)["score"] == 0.0
    with pytest.raises(RewardError, match="strict, flexible"):
        extract_answer("1", "loose")
    with pytest.raises(RewardError, match="cannot read a number"):
        compute_score("#### 1", "many")


def test_numbers_in_text():
    assert to_decimal("1,234.5") == Decimal("1234.5")
    assert to_decimal("12 apples") is None
    assert to_decimal("1,23") is None
    assert first_number("  $ 5 each") == 5
    assert last_number("a1 b2") == 2
    assert last_number("none") is None
    assert last_number("1" * 10_000) == Decimal("1" * 10_000)


def shared_gsm8k() -> Path:
    root = Path(os.environ.get("VERL_SHARED", Path(__file__).parents[2].parent / "shared"))
    return root / "data" / "gsm8k"


@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_reference_answer_of_the_real_files_scores_one(split, rows, method):
    path = shared_gsm8k() / f"{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set VERL_SHARED to the folder that holds data/gsm8k")
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(answers) == rows
    wrong = [a for a in answers if compute_score(a, a.split("####")[-1].strip(), method)["score"] != 1.0]
    assert wrong == []
    assert [a for a in answers if compute_score(a, a, method)["score"] != 1.0] == []
