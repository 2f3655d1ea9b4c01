"""The scorer of boxed answers for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score import math_reward

__all__ = ["compute_score_batched"]


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
) -> list[float]:
    pairs = zip(solution_strs, ground_truths, strict=True)
    return [math_reward.compute_score(response, truth) for response, truth in pairs]
