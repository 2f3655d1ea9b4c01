"""What rewards take from a row of data: its truth, `extra_info` and responses, in training, `verl eval` and
`verl reward test` alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import DataError
from verl.json_input import parse_json


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """A dictionary, also one written as JSON text, as csv files have it; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    return value if isinstance(value, Mapping) else None


def truth_of(row: Mapping[str, Any], key: str = "reward_model") -> Any:
    """The reference answer: `ground_truth` inside column `key`, else that column itself, else the columns
    `ground_truth`, `answer`, else None. `reward_model`, the default, may hold other things about the reward: there the
    column itself comes last."""
    value = row.get(key)
    nested = as_mapping(value) or {}
    if nested.get("ground_truth") is not None:
        return nested["ground_truth"]
    columns = [row.get("ground_truth"), row.get("answer")]
    if not {"ground_truth", "style"} & nested.keys():  # else a reward_model of verl's form, without a truth
        columns.insert(2 if key == "reward_model" else 0, value)
    return next((truth for truth in columns if truth is not None), None)


def extra_info_of(row: Mapping[str, Any], origin: str, files_key: str) -> dict[str, Any]:
    """Column `extra_info`, {} where the row has none; `origin` and `files_key` are named in errors."""
    value = row.get("extra_info")
    extra = as_mapping(value)
    if extra is None and value not in (None, ""):
        raise DataError(
            f"{files_key}: extra_info of {origin} must be a dictionary, or JSON text of one, not "
            f"{str(value)[:80]!r} (a {type(value).__name__})."
        )
    return dict(extra or {})


def responses_of(
    row: Mapping[str, Any], column: str, origin: str, files_key: str, column_key: str
) -> list[str]:
    """The texts in a column that holds a list of them, or one; the last three are named in errors."""
    value = row.get(column)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{files_key}: the column '{column}' of {origin} must hold a text or a list of texts, not "
            f"{str(value)[:80]!r}; set {column_key} to the column with the responses"
        )
    return list(texts)
