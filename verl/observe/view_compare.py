"""Two runs side by side: what was set differently, what came out, and their curves at one scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl.observe.view_files import Run
from verl.observe.view_plot import figure, number, thinned
from verl.observe.view_sections import algorithm_of, chosen_curves, grid, model_of, time_shares
from verl.observe.view_state import last_step, seconds_per_step, state_of, validations
from verl.observe.view_text import draws_dots, styled

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_HEIGHT = 4
_SHOWN_KEYS = 20
# What differs between any two runs and says nothing about them.
_NAMES_ONLY = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")
_TABLE = (
    "reward/mean",
    "train/loss",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/grad_norm",
    "perf/throughput",
)
_WINDOW = 10


def differing_keys(first: Run, second: Run) -> list[tuple[str, str, str]]:
    """(key, value of the first, value of the second) for every key that differs."""
    left, right = dict(_flat(first.config)), dict(_flat(second.config))
    names = [name for name in dict.fromkeys([*left, *right]) if name not in _NAMES_ONLY]
    return [
        (name, str(left.get(name, "-")), str(right.get(name, "-")))
        for name in names
        if left.get(name) != right.get(name)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def recent(run: Run, name: str, window: int = _WINDOW) -> float | None:
    """The mean of a metric over the newest steps."""
    values = [value for _, value in run.log.points(name)[-window:]]
    return sum(values) / len(values) if values else None


def _last(points: list[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def compare(
    first: Run, second: Run, console: Console, patterns: list[str] | None = None
) -> list[RenderableType]:
    """The parts of the view of two runs."""
    parts: list[RenderableType] = [_heads(first, second)]
    keys = differing_keys(first, second)
    parts += [styled("\nset differently", "bold"), _keys(keys)]
    parts += [styled(f"\nmeasured (mean of the last {_WINDOW} steps)", "bold"), _numbers(first, second)]
    parts += [styled("\ncurves, each pair at one scale", "bold"), _curves(first, second, console, patterns)]
    return parts


def _heads(first: Run, second: Run) -> RenderableType:
    from rich.table import Table

    table = Table("", "A", "B", box=None, pad_edge=False, header_style="bold")
    for name, of in (
        ("run", lambda run: run.name),
        ("state", lambda run: state_of(run).text),
        ("model", model_of),
        ("algorithm", algorithm_of),
        ("steps", lambda run: str(last_step(run) if last_step(run) is not None else "none yet")),
    ):
        table.add_row(styled(name, "dim"), styled(of(first)), styled(of(second)))
    return table


def _keys(keys: list[tuple[str, str, str]]) -> RenderableType:
    from rich.table import Table

    if not keys:
        return styled("nothing but names and folders", "dim")
    table = Table("key", "A", "B", box=None, pad_edge=False, header_style="dim")
    for name, left, right in keys[:_SHOWN_KEYS]:
        table.add_row(styled(name), styled(left), styled(right))
    if len(keys) > _SHOWN_KEYS:
        table.add_row(styled(f"and {len(keys) - _SHOWN_KEYS} more", "dim"), styled(""), styled(""))
    return table


def _numbers(first: Run, second: Run) -> RenderableType:
    from rich.table import Table

    table = Table("", "A", "B", "B - A", box=None, pad_edge=False, header_style="dim")
    scores = [validations(run) for run in (first, second)]
    rows: list[tuple[str, float | None, float | None]] = [
        ("validation, last", _last(scores[0]), _last(scores[1])),
        *((name, recent(first, name), recent(second, name)) for name in _TABLE),
        ("seconds per step", seconds_per_step(first), seconds_per_step(second)),
    ]
    spans = [{span: seconds for span, seconds, _ in time_shares(run)} for run in (first, second)]
    for span in list(dict.fromkeys([*spans[0], *spans[1]]))[:3]:
        rows.append((f"  of these {span}", spans[0].get(span), spans[1].get(span)))
    for name, left, right in rows:
        if left is None and right is None:
            continue
        change = "" if left is None or right is None else f"{right - left:+.3g}"
        cells = [number(value) if value is not None else "-" for value in (left, right)]
        table.add_row(styled(name), *map(styled, cells), styled(change))
    return table


def _curves(first: Run, second: Run, console: Console, patterns: list[str] | None) -> RenderableType:
    names = list(dict.fromkeys(chosen_curves(first.log, patterns) + chosen_curves(second.log, patterns)))
    figures = []
    width = (console.width - 3) // 2
    for name in names:
        both = [run.log.points(name) for run in (first, second)]
        values = [value for points in both for _, value in thinned(points, width)]
        steps = [step for points in both for step, _ in points]
        for label, points in zip("AB", both, strict=True):
            if points:
                figures.append(
                    figure(
                        f"{label} {name}",
                        points,
                        width,
                        _HEIGHT,
                        low=min(values),
                        high=max(values),
                        first=min(steps),
                        last=max(steps),
                        braille=draws_dots(console),
                    )
                )
            else:
                figures.append(
                    [f"{label} {name}", *[" " * width for _ in range(_HEIGHT - 1)], "not measured"]
                )
    return grid(figures, 2) if figures else styled("no step has finished yet", "dim")
