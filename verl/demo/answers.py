"""What the model answers to the held-out problems: from the run's own validation, and from the saved folder.

The second is read with plain `transformers`, without any of our code, to show that what was trained is what was
saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.data.tasks.word_problems import PLANS, Plan
from verl.observe.jsonl import read_jsonl


@dataclass(frozen=True)
class Answer:
    """One held-out problem and one answer to it."""

    prompt: str
    question: str
    plan: Plan
    truth: str
    response: str
    right: bool


def read_validation(run_folder: Path, step: int, held_out: Path) -> list[Answer]:
    """The answers a run gave in its validation at `step`, in the order of the held-out file."""
    import pyarrow.parquet as pq

    rows = pq.read_table(held_out).to_pylist()
    found = {row["prompt"]: row for row in read_jsonl(run_folder / "validation" / f"{step}.jsonl")}
    answers = []
    for row in rows:
        question = row["prompt"][0]["content"]
        prompt = next(text for text in found if question in text)
        given = found[prompt]
        answers.append(
            Answer(
                prompt=prompt,
                question=question,
                plan=row["extra_info"]["plan"],
                truth=row["reward_model"]["ground_truth"],
                response=given["response"],
                right=given["score"] == 1.0,
            )
        )
    return answers


def accuracy(answers: Sequence[Answer], plan: Plan | None = None) -> float:
    """The share of right answers, of one kind of question or of all."""
    chosen = [answer.right for answer in answers if plan in (None, answer.plan)]
    return sum(chosen) / len(chosen)


def answer_with_transformers(folder: Path, prompts: Sequence[str], longest: int = 20) -> list[str]:
    """Greedy answers of a saved folder, by `transformers` alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=longest,
            do_sample=False,
        )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def examples(before: Sequence[Answer], after: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """One problem of each kind, preferably one that was wrong before and is right now."""
    chosen = []
    for plan in PLANS:
        pairs = [pair for pair in zip(before, after, strict=True) if pair[0].plan == plan]
        learned = [pair for pair in pairs if pair[1].right and not pair[0].right]
        chosen.append((learned or pairs)[0])
    return chosen
