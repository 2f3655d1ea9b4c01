"""GSM8K: the answer is the number after `####`.

`strict` requires the marker and takes the last one; `flexible` falls back to the last number of the text.
Numbers are compared as numbers. The truth may be the bare number or the dataset's whole reference solution.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from verl.errors import RewardError
from verl.reward.scorers.text import first_number, last_number

MARKER = "####"
METHODS = ("strict", "flexible")


def extract_answer(text: str, method: str = "strict") -> Decimal | None:
    """The final number of a response, or None."""
    if method not in METHODS:
        raise RewardError(
            f"gsm8k method is {method!r}; known: {', '.join(METHODS)}. Set reward_kwargs.method."
        )
    _, marker, tail = text.rpartition(MARKER)
    if marker:
        answer = first_number(tail)
        if answer is not None or method == "strict":
            return answer
    return last_number(text) if method == "flexible" else None


def truth_of(ground_truth: Any) -> Decimal:
    """The number of a reference: '72', 72, 72.0 or a whole solution that ends in '#### 72'."""
    text = str(ground_truth)
    value = first_number(text.rpartition(MARKER)[2])
    if value is None:
        raise RewardError(
            f"The gsm8k scorer cannot read a number in the ground truth {text[:80]!r}; it takes a number or a "
            f"solution that ends in '#### number'."
        )
    return value


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` for the right number, `format_score` for a wrong one in the right form, 0 without an answer."""
    truth = truth_of(ground_truth)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    right = answer == truth
    return {"score": score if right else format_score, "acc": float(right), "pred": str(answer)[:64]}
