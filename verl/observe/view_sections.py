"""The parts of the view of one run, from top to bottom: what it is, its curves, its health, where its time goes."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import DataError
from verl.observe.view_files import MetricsLog, Run, changed, checkpoint_steps, open_run
from verl.observe.view_plot import bar, figure, number
from verl.observe.view_state import (
    ago,
    duration,
    last_step,
    notices,
    read_crash,
    seconds_per_step,
    state_of,
    total_steps,
    validations,
)
from verl.observe.view_text import draws_dots, styled

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# Names of what is plotted, in this order; of a group the first there is. Validation comes after the first.
_CURVES: tuple[tuple[str, ...], ...] = (
    ("reward/mean", "train/loss"),
    ("actor/kl_loss", "actor/kl", "actor/reward_kl_penalty", "actor/ppo_kl"),
    ("actor/entropy",),
    ("response_length/mean",),
    ("perf/throughput",),
    ("actor/grad_norm", "train/grad_norm"),
    ("critic/vf_loss",),
)
_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "stopped": "bold yellow",
    "waiting": "bold yellow",
    "crashed": "bold red",
    "killed": "bold red",
}
_HEIGHT = 4
_OUTSIDE = ("testing", "save_checkpoint")
"""Spans that are not part of a step but happen between some of them."""
_WINDOW = 20


def header(run: Run, console: Console) -> RenderableType:
    """What the run is, how far it came and what became of it."""
    state = state_of(run)
    rows: list[tuple[str, Text]] = []

    def row(name: str, text: str | Text) -> None:
        rows.append((name, styled(text) if isinstance(text, str) else text))

    row("run", styled(f"{run.name}   {run.path}", "bold"))
    row("state", styled(state.text, _STYLES[state.word]))
    crash = read_crash(run.path)
    if state.word == "crashed" and crash is not None and crash[1]:
        row("to do", crash[1])
    row("model", model_of(run))
    row("algorithm", algorithm_of(run))
    row("steps", _progress(run, state.word == "running"))
    results = _results(run)
    if results:
        row("results", results)
    checkpoints = checkpoint_steps(run.path)
    row("checkpoints", ", ".join(map(str, checkpoints[-6:])) if checkpoints else "none yet")
    for problem in _problems(run):
        row("note", styled(problem, "yellow"))
    return facts(rows, console)


def facts(rows: list[tuple[str, Text]], console: Console) -> RenderableType:
    """Names and texts: folded beside each other on a terminal, one line each (to be searched) in a pipe."""
    from rich.console import Group
    from rich.table import Table

    if not console.is_terminal:
        return Group(*(styled(f"{name:<11}  ").append_text(text) for name, text in rows))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def model_of(run: Run) -> str:
    path = run.get("model.path" if run.is_sft else "actor_rollout_ref.model.path")
    if path is None:
        return "unknown"
    rank = run.get("model.lora_rank" if run.is_sft else "actor_rollout_ref.model.lora_rank", 0)
    return f"{path}{f' (LoRA of rank {rank})' if rank else ''}"


def algorithm_of(run: Run) -> str:
    """In a few words: estimator, batch, what else is on."""
    if run.is_sft:
        return f"fine-tuning, {run.get('data.train_batch_size', '?')} rows per step"
    if not run.config:
        return "unknown"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    parts = [str(run.get("algorithm.adv_estimator", "?"))]
    loss = run.get(f"{actor}.policy_loss.loss_mode")
    if loss not in (None, "vanilla"):
        parts.append(f"loss {loss}")
    parts.append(
        f"{run.get('data.train_batch_size', '?')} prompts x {run.get(f'{rollout}.n', '?')} responses"
    )
    parts.append(f"engine {run.get(f'{rollout}.name', '?')}")
    if run.get(f"{actor}.use_kl_loss"):
        parts.append("KL in the loss")
    if run.get("algorithm.use_kl_in_reward"):
        parts.append("KL in the reward")
    rate = run.get("optim.lr" if run.is_sft else f"{actor}.optim.lr")
    if isinstance(rate, (int, float)):
        parts.append(f"lr {rate:g}")
    return ", ".join(parts)


def _progress(run: Run, running: bool) -> str:
    step, total = last_step(run), total_steps(run)
    if step is None:
        return "none yet"
    text = f"{step} of {total}" if total else str(step)
    each = seconds_per_step(run)
    if each is not None:
        text += f", {number(each)} s each"
        if running and total and total > step:
            text += f", about {duration((total - step) * each)} to go"
    return text


def _results(run: Run) -> str:
    parts = []
    for name, label in (("reward/mean", "reward"), ("train/loss", "loss")):
        points = run.log.points(name)
        if points:
            parts.append(f"{label} {number(points[0][1])} -> {number(points[-1][1])}")
    scores = validations(run)
    if scores:
        better = min if run.log.points("val/loss") else max
        best = better(scores, key=lambda item: item[1])
        parts.append(
            f"validation {number(scores[0][1])} -> {number(scores[-1][1])} (best {number(best[1])} at step {best[0]})"
        )
    return "; ".join(parts)


def _problems(run: Run) -> Iterator[str]:
    if run.config_problem:
        yield run.config_problem
    before = read_crash(run.path, "crash.previous.txt")
    if before is not None:
        yield f"an earlier start crashed (crash.previous.txt): {before[0].splitlines()[0]}"
    bad = len(list((run.path / "bad_batches").glob("*")))
    if bad:
        yield f"{bad} batches that gave no usable gradient are kept in {run.path / 'bad_batches'}"
    if run.log.problem:
        yield run.log.problem
    if run.log.cut:
        yield "metrics.jsonl is very large: only its end was read"
    if run.log.damaged:
        yield f"{run.log.damaged} lines of metrics.jsonl could not be read and are left out"


# -- curves -------------------------------------------------------------------------------------------------------


def chosen_curves(log: MetricsLog, patterns: list[str] | None = None) -> list[str]:
    """The metrics to plot: those asked for (shell patterns), else the few that tell whether a run is well."""
    if patterns:
        names = [n for pattern in patterns for n in sorted(log.series) if fnmatch.fnmatchcase(n, pattern)]
        if not names and log.series:
            raise DataError(
                f"--metric {' '.join(patterns)}: no such metric. There are: {', '.join(sorted(log.series))}"
            )
        return [name for name in dict.fromkeys(names) if log.points(name)]
    present = [next((name for name in group if log.points(name)), None) for group in _CURVES]
    measured = [name for name in sorted(log.series) if name.startswith("val-core/") and log.points(name)]
    if log.points("val/loss"):
        measured.append("val/loss")
    names = [name for name in present if name is not None]
    # One curve per thing validated: of `.../mean@1` and `.../pass@1` of the same data the first tells enough.
    validated = list({name.rsplit("/", 1)[0]: name for name in reversed(measured)}.values())[::-1]
    return [*names[:1], *validated[:3], *names[1:]]


def curves(run: Run, console: Console, patterns: list[str] | None = None) -> RenderableType:
    """Small plots, as many beside each other as there is room for."""
    names = chosen_curves(run.log, patterns)
    if not names:
        return styled("no step has finished yet", "dim")
    across = max(1, min(3, console.width // 38))
    width = (console.width - 3 * (across - 1)) // across
    figures = [
        figure(name, run.log.points(name), width, _HEIGHT, braille=draws_dots(console)) for name in names
    ]
    return grid(figures, across)


def grid(figures: list[list[str]], across: int) -> RenderableType:
    """Figures beside and below each other."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3, 1, 0))
    for start in range(0, len(figures), across):
        cells = []
        for lines in figures[start : start + across]:
            cell = Text(lines[0], style="bold", no_wrap=True)
            cell.append("\n" + "\n".join(lines[1:]), style="not bold cyan")
            cells.append(cell)
        table.add_row(*cells)
    return table


# -- health and time ----------------------------------------------------------------------------------------------


def health(run: Run) -> RenderableType:
    """What the rules noticed while the run ran; what is recent first."""
    from rich.console import Group

    found = notices(run)
    if not found:
        quiet = "not judged for fine-tuning" if run.is_sft else "nothing to report"
        return styled(quiet, "dim")
    lines: list[Any] = []
    for notice in found[:8]:
        lines.append(
            styled(
                f"{notice.when}: {notice.line}",
                "yellow" if notice.recent else "dim",
            )
        )
    if len(found) > 8:
        lines.append(styled(f"and {len(found) - 8} more", "dim"))
    return Group(*lines)


def time_shares(run: Run, window: int = _WINDOW) -> list[tuple[str, float, float]]:
    """(span, seconds per step, share) over the newest steps; what is between steps is spread over them."""
    rows = [row for row in run.log.rows[-window:] if _seconds(row, "step") is not None]
    if not rows:
        return []
    spans: dict[str, float] = {}
    for row in rows:
        for name in row:
            span = name.removeprefix("timing_s/")
            if name.startswith("timing_s/") and span != "step":
                spans[span] = spans.get(span, 0.0) + (_seconds(row, span) or 0.0)
    whole = sum(_seconds(row, "step") or 0.0 for row in rows)
    inside = sum(seconds for span, seconds in spans.items() if span not in _OUTSIDE)
    if whole > inside:
        spans["other" if inside else "the step itself"] = whole - inside
    total = whole + sum(spans.get(span, 0.0) for span in _OUTSIDE)
    parts = [(span, seconds / len(rows), seconds / total) for span, seconds in spans.items() if total]
    return sorted(parts, key=lambda part: -part[1])


def _seconds(row: dict[str, Any], span: str) -> float | None:
    value = row.get(f"timing_s/{span}")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def times(run: Run, console: Console) -> RenderableType:
    """Where the time of a step goes."""
    from rich.table import Table

    parts = time_shares(run)
    if not parts:
        return styled("no step has finished yet", "dim")
    table = Table.grid(padding=(0, 2))
    for span, seconds, share in parts:
        if share >= 0.001 or len(parts) <= 4:
            drawn = bar(share, 30, blocks=draws_dots(console))
            between = " (between steps, per step)" if span in _OUTSIDE else ""
            table.add_row(
                styled(span),
                styled(f"{number(seconds)} s"),
                styled(f"{share:.1%}"),
                styled(drawn, "cyan"),
                styled(between, "dim"),
            )
    return table


# -- a folder of runs ---------------------------------------------------------------------------------------------


def listing(paths: list[Path]) -> RenderableType:
    """The runs of a project, newest first."""
    from rich.table import Table

    table = Table("run", "state", "steps", "results", "written", box=None, pad_edge=False, header_style="dim")
    for path in paths:
        run = open_run(path)
        state, step, total = state_of(run), last_step(run), total_steps(run)
        done = "-" if step is None else f"{step}/{total}" if total else str(step)
        table.add_row(
            styled(run.name),
            styled(state.word, _STYLES[state.word]),
            styled(done),
            styled(_results(run) or "-"),
            styled(ago(changed(path))),
        )
    return table
