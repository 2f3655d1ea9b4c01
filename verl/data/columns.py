"""Finding the columns of a dataset, and saying what to set when one is not there."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.files import Rows
from verl.data.messages import is_conversation
from verl.errors import DataError

_USUAL = {
    "prompt": [
        "prompt",
        "question",
        "problem",
        "messages",
        "instruction",
        "query",
        "input",
        "conversations",
        "text",
    ],
    "response": ["response", "answer", "completion", "output", "solution", "target", "chosen"],
}


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
    """The column a user probably meant by `wanted`: a near spelling, a usual name, or the longest text."""
    lowered = {name.lower(): name for name in columns}
    near = difflib.get_close_matches(wanted.lower(), lowered, n=1, cutoff=0.8)
    if near:
        return lowered[near[0]]
    for usual in _USUAL.get(role, ()):
        if usual in lowered and usual != wanted:
            return lowered[usual]
    others = set() if role == "prompt" else set(_USUAL["prompt"])
    texts = {
        name: value
        for name, value in sample.items()
        if name.lower() not in others and (isinstance(value, str) or is_conversation(value))
    }
    return max(texts, key=lambda name: len(str(texts[name])), default=None)


def require_column(rows: Rows, name: str, key: str, role: str, files_key: str) -> None:
    """Raise unless every file has the column; `key` is the setting that names it."""
    start = 0
    for file, columns, count in rows.files():
        if name not in columns and count:
            guess = likely_column(name, role, columns, rows[start])
            advice = f" Set {key}={guess}." if guess else f" Set {key} to the one that holds it."
            if guess and role == "prompt" and is_text(rows[start].get(guess)):
                advice += f" {STRINGS}"
            raise DataError(
                f"{files_key}: {file} has no column '{name}' ({key}). It has: {', '.join(columns) or 'none'}.{advice}"
            )
        start += count
