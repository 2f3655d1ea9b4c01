"""The demo's reward function, an ordinary file: `reward.custom_reward_function.path=.../reward.py`."""

from __future__ import annotations

from typing import Any

from verl.data.tasks.word_problems import WordProblems


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1 when the number after #### is the right one, else 0."""
    return WordProblems().score(solution_str, ground_truth)
