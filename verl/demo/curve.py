"""A chart of a run in text: a line of braille dots for what is measured at every step and marks for validations, or
plain ASCII where the output has no other characters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.text import Text

from verl.observe.diagnoses.base import validation_summary

Point = tuple[int, float]
"""Step, value."""
_BRAILLE = 0x2800
# Bit of the dot at (column, row) of a braille character, two columns by four rows.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_MARGIN = 7
"""Columns of the labels on the left, the axis included."""
_STYLES = {"line": "cyan", "mark": "bold yellow"}


class Curve:
    """Collects the rows of `metrics.jsonl` that make up the chart: reward and accuracy, or loss."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.line: list[Point] = []
        self.marks: list[Point] = []
        self.offline = False
        """Whether it is a run without rewards: the loss is drawn."""

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.offline = self.offline or "train/loss" in metrics
        _append(self.line, step, metrics.get("reward/mean", metrics.get("train/loss")))
        _append(self.marks, step, metrics.get("val/loss", validation_summary(metrics)))

    def draw(self, width: int, height: int, *, ascii_only: bool = False) -> Text | None:
        """A legend, `height` rows of the chart and the axis of steps; nothing before there is something to draw. With
        an odd height one row lies in the middle."""
        if not (self.line or self.marks) or width < _MARGIN + 10:
            return None
        columns = width - _MARGIN
        top = _top([value for _, value in self.line + self.marks])
        cells = _cells(self.line, self.marks, self.last_step, top, columns, height, ascii_only)
        sides, corner, floor = ("|", "+", "-") if ascii_only else ("┤", "└", "─")
        rows = [self._legend(ascii_only)]
        labels = {0: top, height // 2: top * (1 - (height // 2) / (height - 1)), height - 1: 0.0}
        for number, row in enumerate(cells):
            label = f"{labels[number]:.2f}" if number in labels else ""
            rows.append(Text(f"{label:>{_MARGIN - 2}} {sides}") + row)
        rows.append(Text(" " * (_MARGIN - 1) + corner + floor * columns))
        end = f"step {self.last_step}"
        rows.append(Text(" " * _MARGIN + "0" + end.rjust(columns - 1)))
        return Text("\n").join(rows)

    def _legend(self, ascii_only: bool) -> Text:
        line, mark = ("*", "o") if ascii_only else ("⠒⠒", "●")
        names = ("training loss", "validation loss") if self.offline else ("reward", "held-out accuracy")
        parts = Text(" " * _MARGIN)
        for sign, name, style, points in zip(
            (line, mark), names, _STYLES.values(), (self.line, self.marks), strict=True
        ):
            newest = f" {points[-1][1]:.2f}" if points else ""
            parts.append(sign, style).append(f" {name}{newest}   ")
        parts.rstrip()
        return parts


def _append(points: list[Point], step: int, value: Any) -> None:
    if value is not None and math.isfinite(value):
        points.append((step, float(value)))


def _top(values: Sequence[float]) -> float:
    """Of the axis: 1 for shares and rewards up to 1, else the next whole number."""
    return max(1.0, math.ceil(max(values)))


def _cells(
    line: Sequence[Point],
    marks: Sequence[Point],
    last_step: int,
    top: float,
    columns: int,
    rows: int,
    ascii_only: bool,
) -> list[Text]:
    across, down = (1, 1) if ascii_only else (2, 4)
    wide, high = columns * across, rows * down

    def place(point: Point) -> tuple[int, int]:
        x = point[0] / max(last_step, 1) * (wide - 1)
        y = (1 - min(max(point[1] / top, 0.0), 1.0)) * (high - 1)
        return min(max(round(x), 0), wide - 1), round(y)

    bits = [[0] * columns for _ in range(rows)]
    for x, y in _joined([place(point) for point in line]):
        bits[y // down][x // across] |= _DOTS[x % across][y % down]
    drawn: list[list[tuple[str, str]]] = [
        [("*" if ascii_only else chr(_BRAILLE + bit), _STYLES["line"]) if bit else (" ", "") for bit in row]
        for row in bits
    ]
    for point in marks:
        x, y = place(point)
        drawn[y // down][x // across] = ("o" if ascii_only else "●", _STYLES["mark"])
    return [Text.assemble(*row) for row in drawn]


def _joined(points: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Every dot of the straight lines between the points."""
    yield from points[:1]
    for (x0, y0), (x1, y1) in pairwise(points):
        count = max(abs(x1 - x0), abs(y1 - y0))
        for i in range(1, count + 1):
            yield x0 + round(i * (x1 - x0) / count), y0 + round(i * (y1 - y0) / count)
