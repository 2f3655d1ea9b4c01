"""All steps of `metrics.jsonl` as columns, and phases as spans, in bounded memory: of very many steps every second is
kept, every fourth, ...; steps with a validation are kept longer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.json_input import open_regular
from verl.observe.jsonl import complete_lines, parse_row
from verl.observe.run_reader import MetricsLog
from verl.observe.sample_index import number_or_nan

MAX_POINTS = 4096
MAX_NAMES = 2000
TIMELINE_STEPS = 200
TIMELINE_SPANS = 30_000
_PHASE_BYTES = 8 << 20
FIRST_SHOWN = (
    "reward/mean", "train/loss", "val/loss", "response_length/mean", "response_length/clip_ratio", "actor/entropy",
    "actor/kl_loss", "actor/kl", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "train/grad_norm",
    "critic/vf_loss", "critic/vf_explained_var", "training/rollout_probs_diff_mean", "perf/throughput",
    "timing_s/step",
)  # fmt: skip

Span = tuple[str, str, float, float, int]
"""Process, name, start, end (seconds), step."""


class CurveLog(MetricsLog):
    """Every metric over the whole run; `poll` reads what was appended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, tail_bytes=1 << 40)
        self.step = array("q")
        self.series: dict[str, array[float]] = {}
        self._stride = 1

    def _reset(self) -> None:
        super()._reset()
        self.step, self.series, self._stride = array("q"), {}, 1

    def _read(self, file: Any) -> list[dict[str, Any]]:
        for row in self._new_rows(file):
            self._add(row)
        return []

    def _add(self, row: Mapping[str, float]) -> None:
        validated = any(name.startswith("val") for name in row)
        if not self._kept(int(row["step"]), validated):
            return
        count = len(self.step)
        self.step.append(int(row["step"]))
        for name in row.keys() - self.series.keys() - {"step"}:
            if len(self.series) < MAX_NAMES:
                self.series[name] = array("d", [math.nan]) * count
        for name, values in self.series.items():
            values.append(number_or_nan(row.get(name)))
        while len(self.step) > MAX_POINTS:
            self._thin()

    def _kept(self, step: int, validated: bool) -> bool:
        return step % (max(1, self._stride // 8) if validated else self._stride) == 0

    def _thin(self) -> None:
        self._stride *= 2
        measured = [values for name, values in self.series.items() if name.startswith("val")]
        chosen = [
            row
            for row, step in enumerate(self.step)
            if self._kept(step, any(not math.isnan(values[row]) for values in measured))
        ]
        self.step = array("q", [self.step[row] for row in chosen])
        self.series = {
            name: array("d", [values[row] for row in chosen]) for name, values in self.series.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Only metrics that were ever a number."""
        series = {
            name: [None if math.isnan(value) else value for value in values]
            for name, values in sorted(self.series.items())
            if not all(map(math.isnan, values))
        }
        validation = [name for name in series if name.startswith("val-core/")]
        shown: dict[str, list[float | None]] = {}
        for name in [*validation, *(name for name in FIRST_SHOWN if name in series)]:
            # With one response per prompt the mean, the best and the majority are one curve.
            if not any(values == series[name] for other, values in shown.items() if _same_data(other, name)):
                shown[name] = series[name]
        return {"step": list(self.step), "series": series, "shown": list(shown)}


def _same_data(name: str, other: str) -> bool:
    """Whether two metrics of validation are statistics of the same scores."""
    return name.startswith("val-core/") and name.rpartition("/")[0] == other.rpartition("/")[0]


# -- the timeline -------------------------------------------------------------------------------------------------


def timeline(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest steps' phases: of `phases/`, else the times in rows of metrics, laid end to end."""
    spans = list(_recorded(folder / "phases")) or list(_laid_out(rows))
    newest = max((span[4] for span in spans), default=0)
    steps = TIMELINE_STEPS
    while True:
        kept = [span for span in spans if span[4] > newest - steps]
        if len(kept) <= TIMELINE_SPANS or steps == 1:
            break
        steps //= 2
    kept = sorted(kept[-TIMELINE_SPANS:], key=lambda span: (span[2], -span[3]))
    origin = kept[0][2] if kept else 0.0
    return {
        "origin": origin,
        "spans": [
            [process, name, round(start - origin, 4), round(end - origin, 4), step]
            for process, name, start, end, step in kept
        ],
    }


def _recorded(folder: Path) -> Iterator[Span]:
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".jsonl")
    except OSError:
        return
    for file in files:
        for row in _newest_rows(file):
            name, step = row.get("name"), row.get("step")
            start, end = number_or_nan(row.get("start")), number_or_nan(row.get("end"))
            if isinstance(name, str) and start <= end and not math.isnan(number_or_nan(step)):
                yield file.stem, name, start, end, int(step)  # type: ignore[arg-type]


def _newest_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _PHASE_BYTES))
            if size > _PHASE_BYTES:
                file.readline(_PHASE_BYTES)  # the rest of a line
            yield from filter(None, map(parse_row, complete_lines(file)))
    except (OSError, ValueError):
        return


def _laid_out(rows: list[dict[str, Any]]) -> Iterator[Span]:
    """Runs that recorded no phases: one process, one phase after the other, in the order they were measured."""
    at = 0.0
    for row in rows[-TIMELINE_STEPS:]:
        times = {name[9:]: number_or_nan(row[name]) for name in row if name.startswith("timing_s/")}
        whole = times.pop("step", math.nan)
        apart = {name: times.pop(name) for name in ("testing", "save_checkpoint") if name in times}
        parts = {name: seconds for name, seconds in times.items() if seconds >= 0.0}
        length = whole if whole >= 0.0 else sum(parts.values())
        if length > 0.0:
            yield "controller", "step", at, at + length, row["step"]
        begin = at
        for name, seconds in parts.items():
            yield "controller", name, begin, begin + seconds, row["step"]
            begin += seconds
        at = max(at + length, begin)
        for name, seconds in apart.items():
            if seconds >= 0.0:
                yield "controller", name, at, at + seconds, row["step"]
                at += seconds
