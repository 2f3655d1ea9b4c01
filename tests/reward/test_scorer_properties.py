"""Properties of the scorers over many texts and numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from verl.reward.scorers import choice, code, gsm8k, json_schema, math, qa
from verl.reward.scorers.math import quickly_equal
from verl.reward.scorers.text import blocks, first_number, last_number, to_decimal

numbers = st.decimals(min_value=-(10**12), max_value=10**12, places=3, allow_nan=False, allow_infinity=False)


def written(value: Decimal, separator: str, minus: str, currency: str) -> str:
    text = f"{abs(value):,}".replace(",", separator)
    return (minus if value < 0 else "") + currency + text


@given(
    numbers,
    st.sampled_from(["", ",", "\u202f", "\u00a0"]),
    st.sampled_from(["-", "−", "–", "－"]),
    st.sampled_from(["", "$", "€"]),
)
def test_a_number_is_read_however_it_is_written(value, separator, minus, currency):
    text = written(value, separator, minus, currency)
    assert to_decimal(text) == first_number(text + " apples") == last_number("so it is " + text) == value
    assert gsm8k.compute_score(f"#### {text}", str(value))["score"] == 1.0
    assert gsm8k.compute_score(f"#### {text}", str(value + 1))["score"] == 0.0


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(2, 50))
def test_fractions_are_equal_however_they_are_cancelled(top, bottom, factor):
    left, right = f"\\frac{{{top}}}{{{bottom}}}", f"{top * factor}/{bottom * factor}"
    assert quickly_equal(left, right) is True
    assert quickly_equal(left, f"{top * factor + 1}/{bottom * factor}") is False


@given(st.text(max_size=200))
def test_no_text_is_too_strange(text):
    for method in gsm8k.METHODS:
        assert gsm8k.compute_score(text, "7", method)["score"] in (0.0, 1.0)
    assert quickly_equal(text, "7") in (True, False, None)


soup = st.lists(
    st.sampled_from(
        ["\\boxed{", "\\frac", "\\text{", "{", "}", "\\", "\\left(", ")", "[", "1", "2", ",", "%", "$", "^", "\\sqrt",
         "<answer>", "</answer>", "Answer:", "answer is", "(B)", "C", "```python\n", "```", '{"a": ', "x=", "\n", "−"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


@given(soup)
def test_no_response_makes_a_scorer_raise(text):
    assert math.compute_score(text, "7", symbolic=False)["score"] in (0.0, 1.0)
    assert math.compute_dapo_score(text, "7", symbolic=False)["score"] in (-1.0, 1.0)
    assert choice.compute_score(text, "B")["score"] in (0.0, 1.0)
    assert 0.0 <= qa.compute_f1(text, "seven")["score"] <= 1.0
    assert json_schema.compute_score(text, {"type": "object"})["score"] in (0.0, 1.0)
    assert code.extract_code(text) is None or isinstance(code.extract_code(text), str)


@pytest.mark.slow(seconds=10)
def test_no_scorer_takes_more_than_linear_time():
    program = Path(__file__).with_name("hostile_texts.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) >= 15 and all(line.endswith(": ok") for line in lines), done.stdout + done.stderr


@given(st.lists(st.sampled_from(["(", ")", " ", "a"])).map("".join))
def test_blocks_are_what_a_regular_expression_finds(text):
    found = [
        (opening.group(1), inside) for opening, inside in blocks(text, re.compile("([(])"), re.compile("[)]"))
    ]
    assert found == re.findall(r"([(])(.*?)[)]", text)


@given(st.lists(st.sampled_from([*"abc \u0301\u0316", "é", "ﬁ", "ỗ"])).map("".join))
def test_answers_are_compared_without_accents(text):
    plain = unicodedata.normalize("NFKD", text)
    assert qa.normalise(text) == qa.normalise("".join(c for c in plain if not unicodedata.combining(c)))


leaves = st.sampled_from([0, 0.0, 1, 1.0, True, False, None, "1", ""])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)


@given(st.lists(values, max_size=5))
def test_unique_items_are_those_of_jsonschema(items):
    schema = {"type": "array", "uniqueItems": True}
    text = json.dumps(items)
    expected = Draft202012Validator(schema).is_valid(items)
    assert json_schema.compute_score(text, schema)["score"] == float(expected)


def test_json_nested_deeper_than_a_validator_can_walk_is_wrong_and_not_without_a_score():
    schema = {"type": "array", "items": {"$ref": "#"}}
    result = json_schema.compute_score("[" * 300 + "]" * 300, schema)
    assert result["score"] == 0.0 and "nested" in result["json_error"]
