"""The numbers of an evaluation: statistics of one data source, and the table people read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from verl.algorithms.validation import validation_metrics
from verl.observe.logs import shared_console

if TYPE_CHECKING:
    from verl.reward.base import RewardResult

_ORDER = ("mean", "pass", "best", "maj")
"""Statistics of the table, in this order."""


@dataclass(frozen=True)
class SourceReport:
    """One data source."""

    rows: int
    responses: int
    failed: int
    """Responses without a score."""
    core: dict[str, float]
    """`acc/mean@4` (or `reward/...`, where the reward gives no acc) and the like: what to look at first."""
    aux: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def measure(self) -> str:
        """What the core statistics are of: acc or reward."""
        return next(iter(self.core), "reward/").split("/")[0]

    def shown(self) -> dict[str, float]:
        """Statistics of that measure by name: mean@n, pass@k (or best@k, where values are not only 0 and 1), maj@k."""
        both = {**self.core, **self.aux}
        own = {
            name.split("/", 1)[1]: value
            for name, value in both.items()
            if name.startswith(f"{self.measure}/")
        }
        hidden = {"best"} if any(name.startswith("pass@") for name in own) else set()
        kept = [name for name in own if _kind(name) in _ORDER and _kind(name) not in hidden]
        return {name: own[name] for name in sorted(kept, key=_place)}


def _kind(name: str) -> str:
    return name.split("@")[0]


def _place(name: str) -> tuple[int, int]:
    number = re.search(r"\d+$", name)
    return _ORDER.index(_kind(name)), int(number.group()) if number else 0


def source_report(name: str, rows: Sequence[Sequence[RewardResult]]) -> SourceReport:
    """`rows` holds the results of each prompt's responses."""
    results = [(uid, result) for uid, row in enumerate(rows) for result in row]
    keys = dict.fromkeys(key for _, result in results for key in result.extra)
    columns: dict[str, list[Any]] = {"reward": [result.score for _, result in results]}
    columns |= {key: [r.extra.get(key) for _, r in results] for key in keys if key != "reward"}
    metrics = validation_metrics([name] * len(results), [uid for uid, _ in results], columns)
    return SourceReport(
        rows=len(rows),
        responses=len(results),
        failed=sum(result.score is None for _, result in results),
        core=_under(f"val-core/{name}/", metrics),
        aux=_under(f"val-aux/{name}/", metrics),
    )


def _under(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def show(sources: Mapping[str, SourceReport]) -> None:
    """The table, on the command's own output."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = sorted({name for report in sources.values() for name in report.shown()}, key=_place)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("data source", "of"):
        table.add_column(heading)
    for heading in ("rows", "responses", "no score", *names):
        table.add_column(heading, justify="right")
    for source, report in sources.items():
        shown = report.shown()
        counts = [str(number) for number in (report.rows, report.responses, report.failed)]
        values = [f"{shown[name]:.4f}" if name in shown else "" for name in names]
        table.add_row(source, report.measure, *counts, *values)
    shared_console().print(table)
