"""The scorer of geometry answers: boxed, after thoughts in `<think>`. Its home is `verl.reward.scorers.math`."""

from __future__ import annotations

import re

from verl.reward.scorers import math

__all__ = ["acc_reward", "compute_score", "format_reward"]


def format_reward(predict_str: str) -> float:
    """Whether thoughts in `<think>` come first and a boxed answer follows."""
    return float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Whether the answer is right: the boxed one, or the whole text."""
    if use_boxed:
        return float(math.compute_score(predict_str, ground_truth)["acc"])
    return float(math.equal(predict_str, ground_truth))


def compute_score(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """The share `format_score` is for the form, the rest for the right answer."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1 - format_score) * right + format_score * format_reward(predict_str)
