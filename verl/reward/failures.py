"""Counts samples without a score and stops the run when too many of a batch have none.

Such samples are masked from the loss. Above `reward.max_failure_ratio` the run stops, because training on the rest
would be training on whatever happens not to crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from verl.errors import RewardError, TrainingHalted
from verl.reward.base import RewardResult


@dataclass
class FailureAccount:
    """Counts results over a run."""

    max_failure_ratio: float
    scored: int = 0
    failed: int = 0

    def add(self, results: Collection[RewardResult]) -> dict[str, float]:
        """Count a batch and return its metrics. When too much of it failed: RewardError if the function has never
        returned a score, TrainingHalted if it has."""
        errors = [result.error or "no reason given" for result in results if result.score is None]
        self.scored += len(results) - len(errors)
        self.failed += len(errors)
        ratio = len(errors) / len(results) if results else 0.0
        if ratio > self.max_failure_ratio:
            text = (
                f"{len(errors)} of {len(results)} responses got no score ({ratio:.0%}; reward.max_failure_ratio allows "
                f"{self.max_failure_ratio:.0%}). {causes(errors)}"
            )
            if self.scored == 0:
                raise RewardError(
                    f"{text} Try the function alone with `verl reward test --fn FILE --data FILE`."
                )
            raise TrainingHalted(
                f"{text} Fix the reward function, or raise reward.max_failure_ratio or reward.timeout_s, and resume."
            )
        return {"reward/failed": float(len(errors)), "reward/failed_ratio": ratio}


def causes(errors: Collection[str], limit: int = 3) -> str:
    """The most frequent reasons; row numbers and other digits are ignored when counting."""
    example: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for error in errors:
        kind = "".join("#" if c.isdigit() else c for c in error.split(" (response ")[0])[:120]
        example.setdefault(kind, error)
        counted[kind] += 1
    shown = [f"{count}x {example[kind].rstrip('.')}" for kind, count in counted.most_common(limit)]
    return f"Causes: {'; '.join(shown)}."
