"""The scorer of all procedural tasks, an ordinary reward function: chosen by `data_source`."""

from __future__ import annotations

from typing import Any

from verl.data.tasks import get_task


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the final answer of the response is right, else 0.0."""
    return get_task(data_source).score(solution_str, ground_truth)
