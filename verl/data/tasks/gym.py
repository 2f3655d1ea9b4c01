"""The tasks of the package reasoning-gym, when it is installed, in our rows: `tasks/gym/<dataset>`.

Its datasets have their own settings instead of a difficulty; they are kept at their defaults. Its verifiers ask
for the entry as it was generated, which no file format keeps (tuples, integer keys), so the truth of a row is where the
entry comes from, seed and index, and scoring makes it again. Scores are the package's own and may lie between 0
and 1. Answers may have several lines: all that follows the last answer mark counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from verl.data.tasks.base import LEVELS, MARK, Problem, Split, Task, split_of
from verl.errors import DataError, missing_package

_BLOCK = 256


class GymTask(Task):
    """One dataset of reasoning-gym."""

    ability: ClassVar[str] = "reasoning"

    def __init__(self, dataset: str) -> None:
        known = sorted(set(_reasoning_gym().factory.DATASETS) - {"composite"})  # a mixture, not a dataset
        if dataset not in known:
            raise DataError(f"reasoning-gym has no dataset {dataset!r}; it has: {', '.join(known)}.")
        self.dataset = dataset

    @property
    def data_source(self) -> str:
        return f"tasks/gym/{self.dataset}"

    def generate(self, rng: Any, difficulty: int) -> Problem:
        return self._problem(rng.getrandbits(31), rng.randrange(_BLOCK))

    def problems(self, seed: int, difficulty: int = 1, split: Split = "train") -> Iterator[Problem]:
        if difficulty != 1:
            raise DataError(
                f"difficulty={difficulty}: reasoning-gym's datasets have their own settings instead of our "
                f"levels 1 to {LEVELS}; allowed: 1."
            )
        block = 0
        while True:
            for index in range(_BLOCK):
                problem = self._problem((seed * 1009 + block) % 2**31, index)
                if split_of(f"{self.data_source}/{problem.key}") == split:
                    yield problem
            block += 1

    def _problem(self, seed: int, index: int) -> Problem:
        entry = _entry(self.dataset, seed, index)
        question = str(entry["question"])
        return Problem(
            f"{question}\nEnd with {MARK} followed by the answer.",
            {"seed": seed, "index": index},
            "" if entry["answer"] is None else str(entry["answer"]),
            question,
        )

    def score(self, response: str, truth: Any) -> float:
        _, mark, answer = response.rpartition(MARK)
        return self._judge(answer.strip(), truth) if mark else 0.0

    def verify(self, answer: str, truth: Any) -> bool:
        return self._judge(answer, truth) >= 1.0

    def _judge(self, answer: str, truth: Mapping[str, int]) -> float:
        entry = _entry(self.dataset, int(truth["seed"]), int(truth["index"]))
        return float(_reasoning_gym().get_score_answer_fn(self.dataset)(answer, entry))


@lru_cache(maxsize=64)
def _dataset(dataset: str, seed: int) -> Any:
    return _reasoning_gym().create_dataset(dataset, size=_BLOCK, seed=seed)


@lru_cache(maxsize=8192)
def _entry(dataset: str, seed: int, index: int) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = _dataset(dataset, seed)[index]
    return entry


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise missing_package("reasoning-gym", "gym", "a task of tasks/gym/") from None
    return reasoning_gym
