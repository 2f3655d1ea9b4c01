r"""MATH and its relatives (MATH-500, AIME, DAPO-Math, ...): a problem, and an answer or a solution with `\boxed`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.data.prepare.base import Recipe, Row, first_of, rl_row

INSTRUCTION = r"Reason step by step and give the final answer as \boxed{answer}."


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fbox`), braces inside it matched; None without one."""
    for box in reversed(list(_BOX.finditer(text))):
        inside = _braced(text, box.end())
        if inside is not None:
            return inside.strip()
    return None


def _braced(text: str, at: int) -> str | None:
    """The content of the brace group that starts at `at` (after spaces), or the token of a bare `\\boxed 7`."""
    while at < len(text) and text[at] == " ":
        at += 1
    if at >= len(text):
        return None
    if text[at] != "{":
        token = text[at:].split("$")[0].split()
        return token[0].rstrip(".,") if token else None
    depth = 0
    for end in range(at, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[at + 1 : end]
    return None


def convert(row: Mapping[str, Any], index: int, split: str) -> Row | None:
    problem = str(first_of(row, ("problem", "question", "prompt"), "problem")).strip()
    answer = row.get("answer")
    if answer is None or not str(answer).strip():
        answer = last_boxed(str(first_of(row, ("solution", "answer"), "answer or solution")))
    if not answer:
        return None  # a solution without a boxed answer cannot be checked
    kept = {name: str(row[name]) for name in ("level", "type", "subject") if row.get(name) is not None}
    return rl_row(
        "math",
        f"{problem}\n\n{INSTRUCTION}",
        str(answer).strip(),
        ability="math",
        index=index,
        split=split,
        extra={"question": problem, **kept},
    )


RECIPE = Recipe(
    "math",
    r"competition problems, answer in \boxed",
    convert,
    hub_id="DigitalLearningGmbH/MATH-lighteval:default",
)
