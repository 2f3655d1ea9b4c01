"""The scorer of boxed answers in the form of PRIME's: whether right, whether boxed, and the answer."""

from __future__ import annotations

from typing import Any

from verl.reward.scorers import math

__all__ = ["compute_score"]


def compute_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    details = math.compute_score(model_output, ground_truth)
    return bool(details["acc"]), bool(details["pred"]), str(details["pred"])
