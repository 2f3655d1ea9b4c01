"""The tasks of the package reasoning-gym, when it is installed, in our rows: `tasks/gym/<dataset>`.

Its datasets have settings of their own instead of a difficulty; they are kept at their defaults. The truth of a
row is the package's entry as JSON, because its verifiers ask for the entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from verl.data.tasks.base import ANSWER_LINE, LEVELS, Problem, Split, Task, split_of
from verl.errors import DataError, missing_package


class GymTask(Task):
    """One dataset of reasoning-gym."""

    ability: ClassVar[str] = "reasoning"

    def __init__(self, dataset: str) -> None:
        self._gym = _reasoning_gym()
        known = sorted(self._gym.factory.DATASETS)
        if dataset not in known:
            raise DataError(f"reasoning-gym has no dataset {dataset!r}; it has: {', '.join(known)}.")
        self.dataset = dataset

    @property
    def data_source(self) -> str:
        return f"tasks/gym/{self.dataset}"

    def generate(self, rng: Any, difficulty: int) -> Problem:
        return self._problem(self._gym.create_dataset(self.dataset, size=1, seed=rng.getrandbits(31))[0])

    def problems(self, seed: int, difficulty: int = 1, split: Split = "train") -> Iterator[Problem]:
        if difficulty != 1:
            raise DataError(
                f"difficulty={difficulty}: reasoning-gym's datasets have settings of their own instead of our "
                f"levels 1 to {LEVELS}; allowed: 1."
            )
        block = 0
        while True:
            made = self._gym.create_dataset(self.dataset, size=256, seed=(seed * 1009 + block) % 2**31)
            block += 1
            for entry in made:
                problem = self._problem(entry)
                if split_of(f"{self.data_source}/{problem.key}") == split:
                    yield problem

    def _problem(self, entry: dict[str, Any]) -> Problem:
        question = str(entry["question"])
        return Problem(
            f"{question}\n{ANSWER_LINE}", json.dumps(entry, default=str), str(entry["answer"]), question
        )

    def verify(self, answer: str, truth: Any) -> bool:
        score = self._gym.get_score_answer_fn(self.dataset)
        return float(score(answer, json.loads(truth))) >= 1.0


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise missing_package("reasoning-gym", "gym", "a task of tasks/gym/") from None
    return reasoning_gym
