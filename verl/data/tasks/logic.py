"""Simple logic: who is the tallest, and who tells the truth. Every puzzle has exactly one solution."""

from __future__ import annotations

import itertools
import random
from typing import Any, ClassVar

from verl.data.tasks.base import ANSWER_LINE, Problem, Task, parse_list
from verl.data.tasks.words import NAMES

# who says it, about whom, whether the statement is "X tells the truth"
Statement = tuple[int, int, bool]


class Logic(Task):
    """Level n has n + 2 persons in a ranking, or about as many truth-tellers and liars."""

    name: ClassVar[str] = "logic"
    ability: ClassVar[str] = "logic"

    def generate(self, rng: random.Random, difficulty: int) -> Problem:
        kind = _ranking if rng.random() < 0.5 else _liars
        question, answer = kind(rng, difficulty + 2)
        return Problem(f"{question} {ANSWER_LINE}", answer, ", ".join(answer), question)

    def verify(self, answer: str, truth: Any) -> bool:
        given = [name.strip().lower() for name in parse_list(answer.replace(" and ", ", "))]
        return sorted(given) == sorted(str(name).lower() for name in truth)


def _ranking(rng: random.Random, count: int) -> tuple[str, list[str]]:
    """Neighbours of a ranking are compared, so the whole order follows."""
    people = rng.sample(NAMES, count)  # from tallest to shortest
    facts = []
    for taller, shorter in itertools.pairwise(people):
        turned = rng.random() < 0.5
        facts.append(
            f"{shorter} is shorter than {taller}." if turned else f"{taller} is taller than {shorter}."
        )
    rng.shuffle(facts)
    at = rng.randrange(count)
    asked = {0: "the tallest", count - 1: "the shortest"}.get(
        at, f"number {at + 1}, counted from the tallest"
    )
    return f"{' '.join(facts)} Who is {asked}?", [people[at]]


def _liars(rng: random.Random, count: int) -> tuple[str, list[str]]:
    """Everyone either always tells the truth or always lies; statements are added until one world is left."""
    count = max(count - 1, 2)
    people = rng.sample(NAMES, count)
    while True:
        honest = [rng.random() < 0.5 for _ in range(count)]
        if not any(honest):
            continue
        statements: list[Statement] = []
        for _ in range(4 * count):
            speaker, about = rng.sample(range(count), 2)
            says = honest[about] if honest[speaker] else not honest[about]
            if all(said[:2] != (speaker, about) for said in statements):
                statements.append((speaker, about, says))
            # "A says B is honest" holds in a world exactly when its opposite world agrees too, so a statement
            # of another form is needed to tell them apart: someone counts the honest ones.
            speaker = rng.randrange(count)
            number = sum(honest)
            claim = number if honest[speaker] else rng.choice([n for n in range(count + 1) if n != number])
            if len(solutions(count, statements, (speaker, claim))) == 1:
                return _tell(people, statements, (speaker, claim)), [
                    person for person, is_honest in zip(people, honest, strict=True) if is_honest
                ]


def solutions(count: int, statements: list[Statement], counting: tuple[int, int]) -> list[tuple[bool, ...]]:
    """All worlds in which the honest say true things and the liars false ones."""
    speaker, claim = counting
    return [
        world
        for world in itertools.product((False, True), repeat=count)
        if all((world[about] == says) == world[who] for who, about, says in statements)
        and (sum(world) == claim) == world[speaker]
    ]


def _tell(people: list[str], statements: list[Statement], counting: tuple[int, int]) -> str:
    lines = [
        f"{people[who]} says: '{people[about]} {'tells the truth' if says else 'lies'}.'"
        for who, about, says in statements
    ]
    speaker, claim = counting
    verb = "tells" if claim == 1 else "tell"
    lines.append(f"{people[speaker]} says: 'Exactly {claim} of us {verb} the truth.'")
    return (
        f"{', '.join(people[:-1])} and {people[-1]} each either always tell the truth or always lie. "
        f"{' '.join(lines)} Who tells the truth? Name all of them, separated by commas."
    )
