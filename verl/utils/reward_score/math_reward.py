"""The scorer of boxed answers as a plain number. Its home is `verl.reward.scorers.math`."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers import math

__all__ = ["compute_score", "is_equiv"]


def compute_score(solution_str: str, ground_truth: Any) -> float:
    return float(math.compute_score(solution_str, ground_truth)["score"])


def is_equiv(str1: str, str2: str) -> bool:
    """Whether two answers are the same."""
    return math.equal(str1, str2)
