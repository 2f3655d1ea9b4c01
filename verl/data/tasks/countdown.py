"""Countdown: reach a target from given numbers, each used at most once, with + - * / and parentheses.

There are many right answers, so the verifier computes the expression it is given, exactly (fractions) and without
`eval`: only numbers, the four operators and parentheses are read, and only up to a bounded length.
"""

from __future__ import annotations

import ast
import operator
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from verl.data.tasks.base import Problem, Task

# level -> (numbers given, numbers used, largest number)
_LEVELS: dict[int, tuple[int, int, int]] = {
    1: (3, 2, 10),
    2: (3, 3, 20),
    3: (4, 3, 50),
    4: (4, 4, 99),
    5: (6, 5, 99),
}
_LONGEST = 400
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Countdown(Task):
    name: ClassVar[str] = "countdown"
    ability: ClassVar[str] = "math"

    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        given, used, largest = _LEVELS[difficulty]
        numbers = [rng.randint(1, largest) for _ in range(given)]
        target, answer = _walk(rng, rng.sample(numbers, used))
        key = f"{sorted(numbers)} -> {target}"
        return Problem(question_of(numbers, target), {"numbers": numbers, "target": target}, answer, key)

    def verify(self, answer: str, truth: Any) -> bool:
        if not isinstance(truth, Mapping):
            return False
        expression = answer.split("=")[0]
        try:
            value, used = evaluate_expression(expression)
        except ValueError:
            return False
        given = Counter(int(number) for number in truth["numbers"])
        return value == int(truth["target"]) and not Counter(used) - given


def question_of(numbers: Sequence[int], target: int) -> str:
    listed = ", ".join(map(str, numbers))
    return (
        f"Use the numbers {listed}, each at most once, with + - * / and parentheses, to make {target}. "
        "End with a line that holds #### and the answer."
    )


def _walk(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
    """Join numbers from left to right by operators that keep the value a positive integer."""
    value, text = numbers[0], str(numbers[0])
    for position, number in enumerate(numbers[1:]):
        results = {"+": value + number}
        if value > number:
            results["-"] = value - number
        if value * number <= 1000:
            results["*"] = value * number
        if value % number == 0 and number > 1:
            results["/"] = value // number
        sign = rng.choice(list(results))
        left = f"({text})" if position and sign in "*/" else text
        value, text = results[sign], f"{left} {sign} {number}"
    return value, text


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Value and numbers of an arithmetic expression; ValueError for anything else."""
    plain = text.replace("×", "*").replace("·", "*").replace("÷", "/").replace("−", "-").strip()
    if len(plain) > _LONGEST:
        raise ValueError("expression too long")
    try:
        tree = ast.parse(plain, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    numbers: list[int] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    operation = _OPERATIONS.get(type(node.op)) if isinstance(node, ast.BinOp) else None
    if isinstance(node, ast.BinOp) and operation:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        if right or operation is not operator.truediv:
            return operation(left, right)
    raise ValueError("only numbers, + - * / and parentheses are allowed, and no division by zero")
