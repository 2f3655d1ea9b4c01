"""The scorer of boxed answers, which compares symbolically where math-verify is installed."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import math_reward

__all__ = ["compute_score"]


def compute_score(model_output: str, ground_truth: Any, timeout_score: float = 0) -> float:
    """An answer that cannot be compared in time counts as wrong; another `timeout_score` is refused."""
    if timeout_score:
        raise ValueError(f"timeout_score={timeout_score}: an answer that cannot be compared in time scores 0")
    return math_reward.compute_score(model_output, ground_truth)
