"""What the demo puts on the terminal: a live display where someone watches, few lines where output is piped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.demo.answers import Answer, accuracy, examples
from verl.demo.stages import LOGGER
from verl.observe.console import StepConsole, shared_console
from verl.observe.trackers import register_tracker

if TYPE_CHECKING:
    from verl.observe.run_folder import RunFolder

_KINDS = {
    "add": "how many in all",
    "subtract": "how many are left",
    "first": "how many at first",
    "second": "how many came or went",
}


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


@register_tracker(LOGGER)
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


def places(out: Path, sft: Path, rl: Path, model: Path) -> None:
    line(f"run folder        {rl}")
    line(f"fine-tuning run   {sft}")
    line(f"trained model     {model}")
    line(f"data and start    {out}")
