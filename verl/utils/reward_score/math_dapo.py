"""DAPO's scorer: 1 or -1 under `score`, with `acc` and `pred`. Its home is `verl.reward.scorers.math`."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers.math import compute_dapo_score
from verl.reward.scorers.text import normalise
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]


def compute_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    """`strict_box_verify`: the answer is the last box instead of the last `Answer: ...`."""
    return compute_dapo_score(solution_str, ground_truth, boxed=strict_box_verify)


def normalize_final_answer(final_answer: str) -> str:
    """The form in which answers are compared here."""
    return normalise(final_answer)
