"""How much failing is too much.

A sample without a score is masked from the loss and counted; a batch with more of them than
`reward.max_failure_ratio` ends the run with the cause, because training on the rest would be training on
whatever happens not to crash. The helper is pure: the loop feeds it results, it keeps no clock and no files.
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

    max_failure_ratio: float = 0.2
    scored: int = 0
    failed: int = 0

    def add(self, results: Collection[RewardResult]) -> dict[str, float]:
        """Take a batch in; its metrics. Raises when too much of it failed: RewardError where the function has
        never given a score (it cannot work), TrainingHalted where it used to."""
        errors = [result.error or "no reason given" for result in results if result.score is None]
        scored_before = self.scored
        self.scored += len(results) - len(errors)
        self.failed += len(errors)
        ratio = len(errors) / len(results) if results else 0.0
        if ratio > self.max_failure_ratio:
            text = (
                f"{len(errors)} of {len(results)} responses got no score ({ratio:.0%}; "
                f"reward.max_failure_ratio allows "
                f"{self.max_failure_ratio:.0%}). {causes(errors)}"
            )
            if self.scored == 0 and scored_before == 0:
                raise RewardError(
                    f"{text} Try the function alone with `verl reward test --fn FILE --data FILE`."
                )
            raise TrainingHalted(
                f"{text} Mend the reward function, or raise reward.max_failure_ratio or reward.timeout_s, "
                f"and resume."
            )
        return {"reward/failed": float(len(errors)), "reward/failed_ratio": ratio}


def causes(errors: Collection[str], limit: int = 3) -> str:
    """The most frequent reasons, with row numbers and other digits ignored when counting."""
    example: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for error in errors:
        kind = "".join("#" if c.isdigit() else c for c in error.split(" (response ")[0])[:120]
        example.setdefault(kind, error)
        counted[kind] += 1
    shown = [f"{count}x {example[kind]}" for kind, count in counted.most_common(limit)]
    return "Causes: " + "; ".join(text.rstrip(".") for text in shown) + "."
