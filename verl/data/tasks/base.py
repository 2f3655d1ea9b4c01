"""A procedural task: a generator of problems, a verifier of answers, and rows in the ordinary format.

A problem is a pure function of seed and difficulty. A hash of its key decides its split, so training and test rows
never share a problem, whatever the seeds. The verifier accepts the problem's reference answer.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from verl.errors import DataError

Split = Literal["train", "test"]
LEVELS = 5
MARK = "####"
_TEST_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """A question, its truth as the verifier takes it, an answer that is right, and what makes it this problem."""

    question: str
    truth: Any
    answer: str
    key: str
    group: str = ""
    """Problems of one group stay in one split, so that a test problem has no near relative in training; default:
    the key, which separates only identical problems."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Goes into the row's `extra_info`; the same names for every problem of a task."""


class Task(ABC):
    """A kind of problems. `generate` draws, `verify` judges."""

    name: ClassVar[str]
    ability: ClassVar[str]

    @property
    def data_source(self) -> str:
        return f"tasks/{self.name}"

    @abstractmethod
    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        """Draw a problem; `difficulty` is 1 (easiest) to 5."""

    @abstractmethod
    def verify(self, answer: str, truth: Any) -> bool:
        """Whether the text after the answer mark is right."""

    def score(self, response: str, truth: Any) -> float:
        """1.0 for a response whose final answer is right, else 0.0."""
        answer = final_answer(response)
        return float(answer is not None and self.verify(answer, truth))

    def problems(self, seed: int, difficulty: int = 1, split: Split = "train") -> Iterator[Problem]:
        """Problems of a split without end; the same problem may come again."""
        if not 1 <= difficulty <= LEVELS:
            raise DataError(f"difficulty={difficulty} of the task '{self.name}'; allowed: 1 to {LEVELS}.")
        if split not in ("train", "test"):
            raise DataError(f"split={split!r} of the task '{self.name}'; allowed: train, test.")
        rng = random.Random(f"{self.name}/{split}/{difficulty}/{seed}")
        while True:
            problem = self.generate(rng, difficulty)
            if split_of(f"{self.name}/{problem.group or problem.key}") == split:
                yield problem

    def rows(
        self, count: int, seed: int = 0, difficulty: int = 1, split: Split = "train"
    ) -> list[dict[str, Any]]:
        """`count` different problems as rows for training and evaluation."""
        found: dict[str, Problem] = {}
        repeats = 0
        for problem in self.problems(seed, difficulty, split):
            if problem.key in found:
                repeats += 1
                if repeats > 1000 + 50 * count:
                    raise DataError(
                        f"the task '{self.name}' has only about {len(found)} different problems of difficulty "
                        f"{difficulty} for {split}, not {count}: ask for fewer or raise the difficulty."
                    )
                continue
            found[problem.key] = problem
            if len(found) >= count:
                break
        return [
            self.row(problem, index, difficulty, split)
            for index, problem in enumerate(list(found.values())[:count])
        ]

    def row(self, problem: Problem, index: int, difficulty: int, split: Split) -> dict[str, Any]:
        extra: dict[str, Any] = {"index": index, "split": split, "difficulty": difficulty}
        extra |= {"reference": f"{MARK} {problem.answer}", **problem.extra}
        return rl_row(self.data_source, problem.question, problem.truth, self.ability, extra)


def rl_row(
    data_source: str, question: str, truth: Any, ability: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """A row for reinforcement learning in the usual columns."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def split_of(key: str) -> Split:
    """The split of a problem."""
    digest = hashlib.sha256(key.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < _TEST_SHARE * 2**64 else "train"


def final_answer(response: str) -> str | None:
    """The text after the last answer mark, to the end of its line; None without a mark."""
    _, mark, rest = response.rpartition(MARK)
    if not mark:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def parse_integer(text: str) -> int | None:
    """An integer as people write it: thousands separators, a plus, any of the minus signs, a closing full stop."""
    plain = text.strip().rstrip(".").replace("−", "-").replace("–", "-")
    if not re.fullmatch(r"[+-]? ?(\d{1,3}(,\d{3})+|\d{1,100})", plain):
        return None
    return int(plain.replace(",", "").replace(" ", ""))
