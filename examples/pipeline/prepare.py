"""The files of the pipeline: a tiny model, demonstrations, preference pairs, problems to train on and held-out ones.

The demonstrations calculate well and read badly (see verl/demo/data.py). In a pair the chosen answer does what the
question asks, the rejected one does something else with the same numbers.
"""

import random
import sys
from pathlib import Path

from verl.data.tasks.base import split_of
from verl.data.tasks.word_problems import PLANS, WordProblems
from verl.data.write import write_rows
from verl.demo.data import DIFFICULTY, write_files
from verl.demo.model import build_model_folder


def pair(story, draw):
    """One row for preference training."""
    wrong = draw.choice([plan for plan in PLANS if story.worked(plan) != story.worked(story.plan)])
    return {
        "prompt": [{"role": "user", "content": story.text}],
        "chosen": story.worked(story.plan),
        "rejected": story.worked(wrong),
    }


def main(folder, pairs=2000):
    build_model_folder(folder / "model", 0)
    write_files(folder / "data", 0)
    task, draw = WordProblems(), random.Random(0)
    rows = {"train": [], "test": []}
    while len(rows["train"]) < pairs:
        story = task.story(draw, DIFFICULTY)
        rows[split_of(f"{task.name}/{task.problem(story).group}")].append(pair(story, draw))
    write_rows(rows["train"], folder / "data" / "pairs.parquet")
    write_rows(rows["test"][:100], folder / "data" / "pairs_val.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
