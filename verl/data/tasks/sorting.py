"""Put numbers or words in order."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from verl.data.tasks.base import ANSWER_LINE, Problem, Task, parse_integer, parse_list
from verl.data.tasks.words import WORDS

# level -> (entries, largest number)
_LEVELS: dict[int, tuple[int, int]] = {1: (4, 20), 2: (6, 99), 3: (8, 999), 4: (12, 9_999), 5: (20, 99_999)}


class Sorting(Task):
    name: ClassVar[str] = "sorting"
    ability: ClassVar[str] = "reasoning"

    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        count, largest = _LEVELS[difficulty]
        falling = rng.random() < 0.5
        if rng.random() < 0.5:
            numbers = rng.sample(range(1, largest + 1), count)
            entries = [str(number) for number in numbers]
            right = [str(number) for number in sorted(numbers, reverse=falling)]
            order = "from largest to smallest" if falling else "from smallest to largest"
            what = f"these numbers {order}"
        else:
            entries = rng.sample(WORDS, count)
            right = sorted(entries, reverse=falling)
            what = f"these words in {'reverse ' if falling else ''}alphabetical order"
        question = f"Put {what}: {', '.join(entries)}. Separate them by commas. {ANSWER_LINE}"
        return Problem(question, right, ", ".join(right), question)

    def verify(self, answer: str, truth: Any) -> bool:
        return [_entry(text) for text in parse_list(answer)] == [_entry(str(text)) for text in truth]


def _entry(text: str) -> str | int:
    number = parse_integer(text)
    return text.lower() if number is None else number
