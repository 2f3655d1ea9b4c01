"""Small operations on words: reverse, count, pick, remove, repeat."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from verl.data.tasks.base import ANSWER_LINE, Problem, Task
from verl.data.tasks.words import WORDS

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


class Strings(Task):
    """Level n works on a text of n words."""

    name: ClassVar[str] = "strings"
    ability: ClassVar[str] = "reasoning"

    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        text = " ".join(rng.sample(WORDS, difficulty))
        question, answer = rng.choice((_reverse, _count, _pick, _remove, _capitals, _order))(rng, text)
        return Problem(f"{question} {ANSWER_LINE}", answer, answer, question)

    def verify(self, answer: str, truth: Any) -> bool:
        return answer.strip().strip("'\"").removesuffix(".") == str(truth)


def _reverse(rng: random.Random, text: str) -> tuple[str, str]:
    return f"Write '{text}' backwards, letter by letter.", text[::-1]


def _count(rng: random.Random, text: str) -> tuple[str, str]:
    letter = rng.choice(text.replace(" ", ""))
    return f"How many times does the letter '{letter}' occur in '{text}'?", str(text.count(letter))


def _pick(rng: random.Random, text: str) -> tuple[str, str]:
    word = rng.choice(text.split())
    at = rng.randrange(min(len(word), len(_ORDINALS)))
    return f"In the text '{text}', what is the {_ORDINALS[at]} letter of '{word}'?", word[at]


def _remove(rng: random.Random, text: str) -> tuple[str, str]:
    letter = rng.choice(text.replace(" ", ""))
    left = " ".join(text.replace(letter, "").split())
    return f"Remove every '{letter}' from '{text}'.", left


def _capitals(rng: random.Random, text: str) -> tuple[str, str]:
    return f"Write the last letter of each word of '{text}' in capitals and join them.", "".join(
        word[-1].upper() for word in text.split()
    )


def _order(rng: random.Random, text: str) -> tuple[str, str]:
    return f"Write the words of '{text}' in the opposite order.", " ".join(reversed(text.split()))
