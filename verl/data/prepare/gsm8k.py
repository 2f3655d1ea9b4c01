"""GSM8K: grade-school word problems; the reference solution ends with `#### ` and a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.data.prepare.base import Recipe, Row, first_of, rl_row
from verl.errors import DataError

INSTRUCTION = "Work it out step by step, then write the result alone on the last line, as: #### number"


def final_number(solution: str) -> str:
    """The text after the last `####`, without thousands separators."""
    _, mark, rest = solution.rpartition("####")
    number = rest.strip().replace(",", "").lstrip("$")
    if not mark or not number:
        raise DataError(f"the answer has no '#### number' at its end: ...{solution[-60:]!r}")
    return number


def convert(row: Mapping[str, Any], index: int, split: str) -> Row:
    question = str(first_of(row, ("question", "problem"), "question")).strip()
    solution = str(first_of(row, ("answer", "solution"), "answer"))
    return rl_row(
        "gsm8k",
        f"{question}\n\n{INSTRUCTION}",
        final_number(solution),
        ability="math",
        index=index,
        split=split,
        extra={"question": question, "answer": solution},
    )


RECIPE = Recipe("gsm8k", "grade-school word problems, answer after ####", convert, hub_id="openai/gsm8k:main")
