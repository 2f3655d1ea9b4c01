"""GSM8K's scorer as a plain number. Its home is `verl.reward.scorers.gsm8k`."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers import gsm8k

__all__ = ["compute_score", "extract_solution"]


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final number of a response as text, or None."""
    answer = gsm8k.extract_answer(solution_str, method)
    return None if answer is None else str(answer)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    return float(gsm8k.compute_score(solution_str, ground_truth, method, format_score, score)["score"])
