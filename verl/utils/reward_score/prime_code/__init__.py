"""The scorer of programs in the form of PRIME's. Its home is `verl.reward.scorers.code`; they run in the sandbox."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers import code

__all__ = ["compute_score"]


def compute_score(
    completion: str, test_cases: Any, continuous: bool = False
) -> tuple[float, list[dict[str, Any]]]:
    """The share of tests passed if `continuous`, else whether all passed; and what is known about them."""
    details = code.compute_score(completion, test_cases, all_or_nothing=not continuous)
    return float(details["score"]), [details]
