"""Finding the columns of a dataset, and saying what to set when one is not there; and what rewards take from a row: its
truth, `extra_info` and responses, in training, `verl eval` and `verl reward test` alike."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.files import Rows
from verl.data.messages import is_conversation
from verl.errors import DataError
from verl.json_input import parse_json

_USUAL = {
    "prompt": [
        "prompt", "question", "problem", "messages", "instruction", "query", "input", "conversations", "text",
    ],
    "response": ["response", "answer", "completion", "output", "solution", "target", "chosen"],
}  # fmt: skip


STRINGS = (
    "It holds strings: data.apply_chat_template=always makes each a message of the user in the chat template."
)
"""What to say of a prompt column."""


def is_text(value: Any) -> bool:
    """Whether a prompt is a string, not messages."""
    return isinstance(value, str) and not is_conversation(value)


def as_number(value: Any) -> float:
    """A number in a row, also one that is written as text; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def likely_column(wanted: str, role: str, columns: Sequence[str], sample: Mapping[str, Any]) -> str | None:
    """The column a user probably meant by `wanted`: a near spelling, a usual name, or for prompts the longest text."""
    lowered = {name.lower(): name for name in columns}
    near = difflib.get_close_matches(wanted.lower(), lowered, n=1, cutoff=0.8)
    if near:
        return lowered[near[0]]
    for usual in _USUAL.get(role, ()):
        if usual in lowered and usual != wanted:
            return lowered[usual]
    if role != "prompt":
        return None
    texts = {
        name: value for name, value in sample.items() if isinstance(value, str) or is_conversation(value)
    }
    return max(texts, key=lambda name: len(str(texts[name])), default=None)


def require_column(rows: Rows, name: str, key: str, role: str, files_key: str) -> None:
    """Raise unless every file has the column; `key` is the setting that names it."""
    start = 0
    for file, columns, count in rows.files():
        if name not in columns and count:
            guess = likely_column(name, role, columns, rows[start])
            advice = f" Set {key} to the one that holds it"
            advice += f"; is it '{guess}'? Then {key}={guess}." if guess else "."
            if guess and role == "prompt" and is_text(rows[start].get(guess)):
                advice += f" {STRINGS}"
            raise DataError(
                f"{files_key}: {file} has no column '{name}' ({key}). It has: {', '.join(columns) or 'none'}.{advice}"
            )
        start += count


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
