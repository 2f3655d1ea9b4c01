"""The demo's files: problems to train on, held-out problems, demonstrations for fine-tuning and preference pairs.

Demonstrations have the right form and arithmetic, but in most of them the numbers are just added, whatever the
question asks. Fine-tuning learns form, arithmetic and that habit; reinforcement learning, which sees only whether the
final number is right, has to learn to read the question. No pair of numbers of a held-out problem occurs in any
demonstration or training problem.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.data.tasks.base import Split, split_of
from verl.data.tasks.word_problems import PLANS, Plan, Story, WordProblems
from verl.data.write import write_rows

DIFFICULTY = 2
READS_THE_QUESTION = 0.28
HABIT: dict[Plan, float] = {"add": 0.88, "subtract": 0.08, "first": 0.02, "second": 0.02}


@dataclass(frozen=True)
class DemoFiles:
    """Paths of the demo's data."""

    demonstrations: Path
    demonstrations_val: Path
    train: Path
    held_out: Path


def write_files(
    folder: Path, seed: int, *, demonstrations: int = 24_000, train: int = 4000, held_out: int = 300
) -> DemoFiles:
    """All files of one demo run. The held-out problems are the same for every seed."""
    files = DemoFiles(*(folder / f"{name}.parquet" for name in ("sft_train", "sft_val", "train", "held_out")))
    task = WordProblems()
    rng = random.Random(f"pupil/{seed}")
    write_rows([demonstrate(s, rng) for s in _stories("train", seed, demonstrations)], files.demonstrations)
    write_rows([demonstrate(s, rng) for s in _stories("test", seed, 200)], files.demonstrations_val)
    write_rows(task.rows(train, seed, DIFFICULTY, "train"), files.train)
    write_rows(task.rows(held_out, 0, DIFFICULTY, "test"), files.held_out)
    return files


def write_pairs(folder: Path, seed: int, *, train: int = 2000, val: int = 100) -> None:
    """Rows for preference training: the chosen answer does what the question asks, the rejected one something else with
    the same numbers."""
    rng = random.Random(f"pairs/{seed}")
    write_rows([pair(s, rng) for s in _stories("train", seed, train)], folder / "pairs_train.parquet")
    write_rows([pair(s, rng) for s in _stories("test", seed, val)], folder / "pairs_val.parquet")


def pair(story: Story, rng: random.Random) -> dict[str, Any]:
    """One row for preference training."""
    wrong = rng.choice([plan for plan in PLANS if story.worked(plan) != story.worked(story.plan)])
    return {
        "prompt": [{"role": "user", "content": story.text}],
        "chosen": story.worked(story.plan),
        "rejected": story.worked(wrong),
    }


def demonstrate(story: Story, rng: random.Random) -> dict[str, Any]:
    """One row for fine-tuning."""
    if rng.random() < READS_THE_QUESTION:
        plan = story.plan
    else:
        plan = rng.choices(PLANS, [HABIT[plan] for plan in PLANS])[0]
    return {"prompt": [{"role": "user", "content": story.text}], "response": story.worked(plan)}


def _stories(split: Split, seed: int, count: int) -> Iterator[Story]:
    task, rng = WordProblems(), random.Random(f"stories/{split}/{seed}")
    while count:
        story = task.story(rng, DIFFICULTY)
        if split_of(f"{task.name}/{task.problem(story).group}") == split:
            count -= 1
            yield story
