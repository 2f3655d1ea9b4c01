"""The scorer of boxed answers as a plain number. Its home is `verl.reward.scorers.math`."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers import math
from verl.reward.scorers.text import last_boxed

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed"]


def compute_score(solution_str: str, ground_truth: Any) -> float:
    return float(math.compute_score(solution_str, ground_truth)["score"])


def is_equiv(str1: str, str2: str) -> bool:
    """Whether two answers are the same."""
    return math.equal(str1, str2)


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` of a text, without what is around it; None where there is none."""
    content = last_boxed(string)
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    r"""What is in `\boxed{...}`."""
    content = last_boxed(s)
    if content is None:
        raise ValueError(f"nothing is boxed in {s!r:.100}")
    return content
