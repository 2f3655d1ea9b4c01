"""Sums, differences and products of integers; parentheses from level 4 on."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from verl.data.tasks.base import ANSWER_LINE, Problem, Task, parse_integer

# level -> (numbers, largest number, operators)
_LEVELS: dict[int, tuple[int, int, str]] = {
    1: (2, 20, "+-"),
    2: (2, 99, "+-*"),
    3: (3, 99, "+-*"),
    4: (4, 99, "+-*"),
    5: (6, 999, "+-*"),
}


class Arithmetic(Task):
    name: ClassVar[str] = "arithmetic"
    ability: ClassVar[str] = "math"

    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        count, largest, operators = _LEVELS[difficulty]
        text, value = _expression(rng, count, largest, operators, grouped=difficulty >= 4)
        return Problem(f"What is {text}? {ANSWER_LINE}", str(value), str(value), text)

    def verify(self, answer: str, truth: Any) -> bool:
        return parse_integer(answer) == int(truth)


def _expression(
    rng: random.Random, count: int, largest: int, operators: str, grouped: bool
) -> tuple[str, int]:
    """A random expression and its value under the usual precedence."""
    operands = [str(rng.randint(1, largest)) for _ in range(count)]
    if grouped:
        at = rng.randrange(count - 1)
        operands[at : at + 2] = [f"({operands[at]} {rng.choice('+-')} {operands[at + 1]})"]
    text = operands[0]
    for operand in operands[1:]:
        text += f" {rng.choice(operators)} {operand}"
    return text, evaluate(text)


def evaluate(text: str) -> int:
    """The value of an expression of integers, + - * and parentheses."""
    from verl.data.tasks.countdown import evaluate_expression

    return int(evaluate_expression(text)[0])
