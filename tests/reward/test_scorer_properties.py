"""Properties of the scorers over many texts and numbers."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from verl.reward.scorers import choice, code, gsm8k, json_schema, math, qa
from verl.reward.scorers.math import quickly_equal
from verl.reward.scorers.numbers import first_number, last_number, to_decimal

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
