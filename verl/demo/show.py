"""What the demo prints: answers to the held-out problems before and after, from the run's validation and from the saved
model loaded with plain `transformers`; a live display where output is a terminal, few lines where it is piped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.tasks.word_problems import PLANS, Plan
from verl.observe.console import StepConsole, shared_console
from verl.observe.jsonl import read_jsonl
from verl.observe.trackers import register_tracker

if TYPE_CHECKING:
    from verl.observe.run_folder import RunFolder

_KINDS = {
    "add": "how many in all",
    "subtract": "how many are left",
    "first": "how many at first",
    "second": "how many came or went",
}


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


class DemoTracker:
    """Every step in the live display; in piped output the first, the last and about twelve between."""

    def __init__(self, total_steps: int, title: str) -> None:
        self.console = StepConsole(total_steps, live=True, title=title)
        self.watched = self.console.console.is_terminal
        self.total = total_steps
        self.every = max(1, total_steps // 12)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.watched or step in (0, 1, self.total) or step % self.every == 0:
            self.console.log(step, metrics)

    def log_samples(self, step: int, rows: list[Mapping[str, Any]]) -> None:
        return None

    def close(self) -> None:
        self.console.close()


@register_tracker("demo")
def demo_tracker(project: str, experiment: str, config: Mapping[str, Any], folder: RunFolder) -> DemoTracker:
    return DemoTracker(config["trainer"]["total_training_steps"], f"{project}/{experiment}")


def headline(text: str) -> None:
    from rich.rule import Rule

    console = shared_console()
    if console.is_terminal:
        console.print(Rule(text, align="left"))
    else:
        line(f"\n== {text} ==")


def line(text: str) -> None:
    from rich.text import Text

    shared_console().print(Text(text), soft_wrap=True)


def command(words: str, arguments: Sequence[str]) -> None:
    """The command this stage is, as it could be typed."""
    line(f"$ {words} \\\n    " + " \\\n    ".join(shlex.quote(argument) for argument in arguments))


def samples(before: Sequence[Answer], after: Sequence[Answer]) -> None:
    """One problem of each kind with its answers before and after."""
    from rich.text import Text

    for old, new in examples(before, after):
        line(f"  {old.question}")
        for when, answer in (("before", old), ("after ", new)):
            mark = Text("right", "green") if answer.right else Text("wrong", "red")
            shared_console().print(
                Text(f"    {when}  ") + mark + Text(f"  {answer.response}"), soft_wrap=True
            )


def results(before: Sequence[Answer], after: Sequence[Answer]) -> None:
    """The final table."""
    from rich.table import Table

    table = Table(title="held-out problems answered right", title_justify="left")
    for name in ("question", "problems", "before RL", "after RL"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for plan, name in _KINDS.items():
        count = sum(answer.plan == plan for answer in before)
        table.add_row(name, str(count), f"{accuracy(before, plan):.2f}", f"{accuracy(after, plan):.2f}")  # type: ignore[arg-type]
    table.add_section()
    table.add_row("all", str(len(before)), f"{accuracy(before):.2f}", f"{accuracy(after):.2f}")
    console = shared_console()
    console.print(table, width=None if console.is_terminal else 80)


def paths(out: Path, sft: Path, rl: Path, model: Path) -> None:
    line(f"run folder        {rl}")
    line(f"fine-tuning run   {sft}")
    line(f"trained model     {model}")
    line(f"data and start    {out}")
