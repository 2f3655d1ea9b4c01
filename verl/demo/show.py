"""What the demo prints: answers to the held-out problems before and after, from the run's validation and from the saved
model loaded with plain `transformers`; a live display where output is a terminal, few lines where it is piped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.tasks.word_problems import PLANS, Plan
from verl.observe.console import StepConsole, shared_console, sparkline
from verl.observe.console import typed as command_line
from verl.observe.jsonl import read_jsonl
from verl.observe.trackers import Tracker, register_tracker

if TYPE_CHECKING:
    from verl.observe.run_folder import RunFolder

_KINDS = {
    "add": "how many in all",
    "subtract": "how many are left",
    "first": "how many at first",
    "second": "how many came or went",
}


@dataclass(frozen=True)
class DemoAnswer:
    """One held-out problem and one answer to it."""

    prompt: str
    question: str
    plan: Plan
    response: str
    right: bool


def read_validation(run_folder: Path, step: int, held_out: Path) -> list[DemoAnswer]:
    """The answers a run gave in its validation at `step`, in the order of the held-out file."""
    import pyarrow.parquet as pq

    given = list(read_jsonl(run_folder / "validation" / f"{step}.jsonl"))
    answers = []
    for row in pq.read_table(held_out).to_pylist():
        question, plan = row["prompt"][0]["content"], row["extra_info"]["plan"]
        answer = next(answer for answer in given if question in answer["prompt"])
        right = answer["score"] == 1.0
        answers.append(DemoAnswer(answer["prompt"], question, plan, answer["response"], right))
    return answers


def accuracy(answers: Sequence[DemoAnswer], plan: Plan | None = None) -> float:
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
    tensors = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        output = model.generate(**tensors, max_new_tokens=longest, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def examples(
    before: Sequence[DemoAnswer], after: Sequence[DemoAnswer]
) -> list[tuple[DemoAnswer, DemoAnswer]]:
    """One problem of each kind, preferably one that was wrong before and is right now; such ones first."""
    chosen = []
    for plan in PLANS:
        pairs = [pair for pair in zip(before, after, strict=True) if pair[0].plan == plan]
        learned = [pair for pair in pairs if pair[1].right and not pair[0].right]
        chosen.append((learned or pairs)[0])
    return sorted(chosen, key=lambda pair: pair[0].right or not pair[1].right)


class DemoTracker(Tracker):
    """Lines for the first, the last and about twelve steps between; on a terminal every step with a curve in the live
    display below them, in piped output the curve of rewards at the end."""

    def __init__(self, total_steps: int, title: str) -> None:
        console = shared_console()
        rows = 11 if console.height >= 24 else 5
        self.console = StepConsole(total_steps, live=True, title=title, rows=rows)
        self.watched = console.is_terminal
        self.total = total_steps
        self.every = max(1, total_steps // 12)
        self.rewards: list[float] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.rewards += [metrics["reward/mean"]] if "reward/mean" in metrics else []
        stays = step in (0, 1, self.total) or step % self.every == 0
        if self.watched or stays:
            self.console.log(step, metrics, stays=stays)

    def close(self) -> None:
        self.console.close()
        rewards = self.rewards
        if rewards and not self.watched:
            line(f"\nreward {rewards[0]:.2f} -> {rewards[-1]:.2f}\n{sparkline(rewards, 72, 9, '.:|')}")


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


def line(text: str, *, typed: bool = False) -> None:
    """Wrapped at words on a terminal; a command that can be typed stays one line, so that it can be copied."""
    from rich.text import Text

    console = shared_console()
    console.print(Text(text), soft_wrap=typed or not console.is_terminal)


def command(words: str, arguments: Sequence[str]) -> None:
    """The command this stage is, as it could be typed."""
    lines = [f"$ {words}", *(f"    {shlex.quote(argument)}" for argument in arguments)]
    line(" \\\n".join(lines), typed=True)


def samples(before: Sequence[DemoAnswer], after: Sequence[DemoAnswer]) -> None:
    """One problem of each kind with its answers before and after."""
    from rich.text import Text

    for old, new in examples(before, after):
        line(f"  {old.question}")
        for when, answer in (("before", old), ("after ", new)):
            mark = ("right", "green") if answer.right else ("wrong", "red")
            text = Text.assemble(f"    {when}  ", mark, f"  {answer.response}")
            shared_console().print(text, soft_wrap=True)


def results(before: Sequence[DemoAnswer], after: Sequence[DemoAnswer]) -> None:
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


def next_steps(out: Path, rl: Path) -> None:
    """Three commands to go on with, as they can be typed in this folder."""
    headline("5  what to try next")
    for about, words in next_commands(out, rl):
        line(f"  # {about}")
        line(f"  {command_line(*words)}", typed=True)


def next_commands(out: Path, rl: Path) -> list[tuple[str, list[str]]]:
    """What a command is for, and its words after the program's name."""
    answers = str(rl / "validation" / "0.jsonl")
    overrides = ["algorithm.adv_estimator=rloo", "trainer.total_training_steps=10"]
    overrides += ["trainer.experiment_name=rloo", f"trainer.default_local_dir={out / 'rloo'}"]
    return [
        ("what it still gets wrong", ["view", str(rl), "--val", "--worst", "3"]),
        (
            "your own reward: change this file, then score the answers with it",
            [
                "reward",
                "test",
                "--fn",
                str(out / "reward.py"),
                "--data",
                answers,
                "--response-key",
                "response",
            ],
        ),
        (
            "another algorithm with the same model, data and reward (10 steps)",
            ["train", "--config-path", str(rl), "--config-name", "config.yaml", *overrides],
        ),
    ]
