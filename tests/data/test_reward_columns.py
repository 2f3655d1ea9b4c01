"""Truths, extra_info and responses as rewards get them."""

from __future__ import annotations

from typing import Any

import pytest

from verl.data.columns import extra_info_of, responses_of, truth_of
from verl.errors import DataError


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"reward_model": {"ground_truth": 0}, "ground_truth": "b", "answer": "c"}, 0),
        ({"reward_model": {"style": "model"}, "ground_truth": "b", "answer": "c"}, "b"),
        ({"reward_model": '{"ground_truth": "a"}', "answer": "c"}, "a"),
        ({"reward_model": "{broken", "answer": "c"}, "c"),
        ({"reward_model": None, "ground_truth": None, "answer": "c"}, "c"),
        ({"reward_model": "a", "answer": "c"}, "c"),
        ({"reward_model": {"ground_truth": None}}, None),
        ({"reward_model": {"style": "rule"}}, None),
        ({"reward_model": "a"}, "a"),
        ({"reward_model": {"name": "f"}}, {"name": "f"}),
        ({"reward_model": {"ground_truth": {"ground_truth": 1}}}, {"ground_truth": 1}),
        ({"answer": '{"ground_truth": 1}'}, '{"ground_truth": 1}'),
        ({}, None),
    ],
)
def test_where_the_truth_is_found(row: dict[str, Any], truth: Any) -> None:
    assert truth_of(row) == truth


@pytest.mark.parametrize(
    ("gold", "truth"),
    [
        ('{"name": "f"}', '{"name": "f"}'),
        ({"name": "f"}, {"name": "f"}),
        ("{1, 2}", "{1, 2}"),
        ("", ""),
        (0, 0),
        ([], []),
        ({}, {}),
        ('{"ground_truth": "7"}', "7"),
        ({"ground_truth": {"name": "f"}, "style": "rule"}, {"name": "f"}),
        ({"ground_truth": None}, "other"),
        (None, "other"),
    ],
)
def test_a_column_named_as_the_truth_is_the_truth(gold: Any, truth: Any) -> None:
    assert truth_of({"gold": gold, "answer": "other", "reward_model": {"ground_truth": "x"}}, "gold") == truth


def test_extra_info() -> None:
    for value, expected in (({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), ("", {}), (None, {})):
        assert extra_info_of({"extra_info": value}, "row 3", "KEY") == expected
    for bad in ('{"a": ', "text", [1]):
        with pytest.raises(DataError, match="KEY: extra_info of row 3 must be a dictionary, or JSON"):
            extra_info_of({"extra_info": bad}, "row 3", "KEY")


def test_responses() -> None:
    for value, expected in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])):
        assert responses_of({"r": value}, "r", "row 3", "KEY", "COLUMN") == expected
    for bad in ({}, {"r": None}, {"r": 5}, {"r": ["a", None]}):
        with pytest.raises(DataError, match="KEY: the column 'r' of row 3 must hold a text.*set COLUMN"):
            responses_of(bad, "r", "row 3", "KEY", "COLUMN")
