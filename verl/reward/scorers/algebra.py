"""Symbolic equality by math-verify. Only ever imported in a helper process that can be killed: neither time nor memory
is bounded here. The import is at the top so that its cost is not counted against the first comparison."""

from __future__ import annotations

import logging

import math_verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def verify(response: str, ground_truth: str) -> float:
    """1 where the two expressions are equal."""
    parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (ground_truth, response)]
    return float(math_verify.verify(*parsed, timeout_seconds=None))
