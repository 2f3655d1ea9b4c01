"""Countdown from files that hold numbers and a target; without files the task generates problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.data.prepare.base import Recipe, Row, first_of, rl_row
from verl.data.tasks.base import ANSWER_LINE
from verl.errors import DataError


def convert(row: Mapping[str, Any], index: int, split: str) -> Row:
    given, target = first_of(row, ("nums", "numbers"), "numbers"), first_of(row, ("target",), "target")
    try:
        numbers, goal = [int(number) for number in given], int(target)
    except (TypeError, ValueError) as error:
        raise DataError(f"numbers and target must be integers, got {given!r} and {target!r}") from error
    question = (
        f"Use the numbers {', '.join(map(str, numbers))}, each at most once, with + - * / and parentheses, "
        f"to make {goal}. {ANSWER_LINE}"
    )
    truth = {"numbers": numbers, "target": goal}
    return rl_row("tasks/countdown", question, truth, ability="math", index=index, split=split)


RECIPE = Recipe("countdown", "reach a target from given numbers; generated without --from", convert)
