"""Short stories with two numbers and a question, solved by reading and a little arithmetic.

The pair of numbers decides the split, so no pair of a test problem has been seen in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl.data.tasks.base import Problem, Task, parse_integer

Plan = Literal["add", "subtract", "first", "second"]
"""What leads to the answer: the sum, the difference, or one of the two numbers unchanged."""
PLANS: tuple[Plan, ...] = ("add", "subtract", "first", "second")

PEOPLE: dict[str, str] = {
    "Mia": "She",
    "Tom": "He",
    "Lena": "She",
    "Ben": "He",
    "Sara": "She",
    "Max": "He",
    "Ida": "She",
    "Leo": "He",
}
THINGS: tuple[str, ...] = ("apples", "pears", "books", "coins", "shells", "cards", "stamps", "marbles")

_GAINS = (
    "{who} has {a} {things}. {they} buys {b} more.",
    "{who} has {a} {things}. {they} gets {b} from {other}.",
    "{who} had {a} {things} and then found {b}.",
)
_LOSSES = (
    "{who} has {a} {things}. {they} gives {b} to {other}.",
    "{who} has {a} {things}. {they} sells {b}.",
    "{who} had {a} {things} and then lost {b}.",
)
_ASK_SUM = ("How many {things} does {who} have in all?", "How many {things} are there in all?")
_ASK_REST = ("How many {things} does {who} have left?", "How many {things} are left?")
_ASK_FIRST = ("How many {things} did {who} have at first?", "How many {things} were there at first?")
_ASK_GAIN = ("How many {things} did {who} get?", "How many {things} are new?")
_ASK_LOSS = ("How many {things} did {who} give up?", "How many {things} are gone?")

TEMPLATES: dict[Plan, tuple[str, ...]] = {
    "add": tuple(f"{story} {ask}" for story in _GAINS for ask in _ASK_SUM),
    "subtract": tuple(f"{story} {ask}" for story in _LOSSES for ask in _ASK_REST),
    "first": tuple(f"{story} {ask}" for story in _GAINS + _LOSSES for ask in _ASK_FIRST),
    "second": tuple(
        f"{story} {ask}"
        for stories, asks in ((_GAINS, _ASK_GAIN), (_LOSSES, _ASK_LOSS))
        for story in stories
        for ask in asks
    ),
}

# level -> (largest first number, largest second number, whether digits may carry, borrow or cancel)
_LEVELS: dict[int, tuple[int, int, bool]] = {
    1: (99, 9, False),
    2: (99, 99, False),
    3: (99, 9, True),
    4: (99, 99, True),
    5: (999, 999, True),
}


@dataclass(frozen=True)
class Story:
    """A problem with its parts, for writing demonstrations."""

    text: str
    things: str
    first: int
    second: int
    plan: Plan

    @property
    def answer(self) -> int:
        return carry_out(self.plan, self.first, self.second)

    def worked(self, plan: Plan | None = None) -> str:
        """A written answer that follows `plan`, by default the right one; the arithmetic is always right."""
        plan = plan or self.plan
        a, b, value = self.first, self.second, carry_out(plan, self.first, self.second)
        steps = {"add": f"{a}+{b}={value}", "subtract": f"{a}-{b}={value}", "first": f"{a}", "second": f"{b}"}
        return f"{steps[plan]} {self.things}. #### {value}"


def carry_out(plan: Plan, first: int, second: int) -> int:
    return {"add": first + second, "subtract": first - second, "first": first, "second": second}[plan]


class WordProblems(Task):
    name: ClassVar[str] = "word_problems"
    ability: ClassVar[str] = "math"

    def story(self, rng: random.Random, difficulty: int) -> Story:
        first, second = _numbers(rng, difficulty)
        plan = rng.choice(PLANS)
        who, other = rng.sample(sorted(PEOPLE), 2)
        things = rng.choice(THINGS)
        text = rng.choice(TEMPLATES[plan]).format(
            who=who, other=other, they=PEOPLE[who], things=things, a=first, b=second
        )
        return Story(text, things, first, second, plan)

    def problem(self, story: Story) -> Problem:
        answer = str(story.answer)
        return Problem(
            story.text,
            answer,
            answer,
            story.text,
            group=f"{story.first} {story.second}",
            extra={"plan": story.plan},
        )

    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        return self.problem(self.story(rng, difficulty))

    def verify(self, answer: str, truth: Any) -> bool:
        return parse_integer(answer) == int(truth)


def _numbers(rng: random.Random, difficulty: int) -> tuple[int, int]:
    largest, second_largest, may_carry = _LEVELS[difficulty]
    while True:
        first, second = rng.randint(10, largest), rng.randint(1, second_largest)
        if second <= first and (may_carry or _digit_by_digit(first, second)):
            return first, second


def _digit_by_digit(first: int, second: int) -> bool:
    """Whether sum and difference have the digits of `first`, each plus or minus the one below it."""
    if len(str(first - second)) < len(str(first)):
        return False
    while second:
        a, b = first % 10, second % 10
        if a + b > 9 or a < b:
            return False
        first, second = first // 10, second // 10
    return True
