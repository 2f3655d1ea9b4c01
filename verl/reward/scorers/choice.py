"""Multiple choice: the letter a response chooses.

Looked for in this order: a box, "answer is (B)" or "Answer: B", a last line that is only a letter, the last letter in
brackets. The truth is a letter, the number of the choice from 0, or the text of a choice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl.errors import RewardError
from verl.reward.scorers.text import last_boxed, normalise

_LETTERS = "ABCDEFGHIJ"
_STATED = re.compile(
    # Possessive: runs of white space would otherwise be divided among the five in every possible way.
    r"(?i:answer|choice|option)\s*+(?i:is|=|would be|should be)?+\s*+:?+\s*+\**+\s*+"
    # A small letter must be marked or end its line: "the answer is a bit hard" chooses nothing.
    r"(?:[(\[]\s*([A-Ja-j])\s*[)\]]|([A-J])\b(?!['’])|([a-j])(?=\W*$))",
    re.MULTILINE,
)
_ALONE = re.compile(r"^\W*([A-J])\W*$")
_BRACKETED = re.compile(r"[(\[]([A-J])[)\]]")


def compute_score(
    solution_str: str, ground_truth: Any, choices: Sequence[str] | None = None
) -> dict[str, Any]:
    truth = _truth(ground_truth, choices)
    answer = extract_choice(solution_str, choices)
    return {"score": float(answer == truth), "acc": float(answer == truth), "pred": answer or ""}


def extract_choice(text: str, choices: Sequence[str] | None = None) -> str | None:
    """The letter chosen, or None."""
    boxed = last_boxed(text)
    if boxed is not None:
        inside = normalise(boxed).strip("()[].")
        if len(inside) == 1 and inside.upper() in _LETTERS:
            return inside.upper()
        return _by_text(boxed, choices)
    stated = [bracketed or big or small for bracketed, big, small in _STATED.findall(text)]
    if stated:
        return stated[-1].upper()
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if lines and (alone := _ALONE.match(lines[-1])):
        return alone.group(1)
    bracketed = _BRACKETED.findall(text)
    if bracketed:
        return bracketed[-1]
    return _by_text(lines[-1], choices) if lines else None


def _by_text(text: str, choices: Sequence[str] | None) -> str | None:
    wanted = _plain(text)
    for letter, choice in zip(_LETTERS, choices or (), strict=False):
        if _plain(str(choice)) == wanted:
            return letter
    return None


def _truth(ground_truth: Any, choices: Sequence[str] | None) -> str:
    if isinstance(ground_truth, int) and 0 <= ground_truth < len(_LETTERS):
        return _LETTERS[ground_truth]
    text = str(ground_truth).strip()
    letter = text.strip("()[]. ").upper()
    if len(letter) == 1 and letter in _LETTERS:
        return letter
    if letter.isdigit() and int(letter) < len(_LETTERS):
        return _LETTERS[int(letter)]
    by_text = _by_text(text, choices)
    if by_text is None:
        raise RewardError(
            f"The multiple-choice scorer cannot use the ground truth {text[:80]!r}; it takes a letter A to J, the "
            f"number of the choice from 0, or the text of one of the column 'choices'."
        )
    return by_text


def _plain(text: str) -> str:
    return re.sub(r"\W+", " ", text).strip().lower()
