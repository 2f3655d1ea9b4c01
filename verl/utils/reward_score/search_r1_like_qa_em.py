"""The scorer of short answers, exact match, as a plain number. Its home is `verl.reward.scorers.qa`."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers import qa

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: Any) -> float:
    return float(qa.compute_em(solution_str, ground_truth)["score"])
