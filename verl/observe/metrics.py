"""Metrics that know how they are reduced, whatever their names, and timers.

`reduce_metrics` joins the parts of one mini-batch (micro-batches, ranks); `average_metrics` joins
mini-batches and epochs into one figure per training step. A part's value may be a zero-dimensional
tensor on the device, so that collecting metrics does not wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from verl.observe.live import live

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """One observation: a value, how to join it with others, and its weight in a mean (usually tokens)."""

    value: Any
    reduce: Reduction = "mean"
    weight: Any = 1.0

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum", "max", "min"):
            raise ValueError(f"unknown reduction {self.reduce!r}; known: mean, sum, max, min")


def as_metric(value: Any) -> Metric:
    return value if isinstance(value, Metric) else Metric(value)


def _join(parts: list[Metric], across_steps: bool) -> Metric:
    kind = parts[0].reduce
    if any(part.reduce != kind for part in parts):
        raise ValueError(f"one metric, several reductions: {sorted({part.reduce for part in parts})}")
    values = [float(part.value) for part in parts]
    weights = [float(part.weight) for part in parts]
    if kind == "max":
        return Metric(max(values), "max")
    if kind == "min":
        return Metric(min(values), "min")
    if kind == "sum":
        return Metric(sum(values) / (len(values) if across_steps else 1), "sum")
    total = sum(weights)
    if total == 0:
        return Metric(0.0, "mean", 0.0)
    return Metric(sum(v * w for v, w in zip(values, weights, strict=True) if w != 0) / total, "mean", total)


def _by_name(parts: Iterable[Mapping[str, Any]]) -> dict[str, list[Metric]]:
    grouped: dict[str, list[Metric]] = {}
    for part in parts:
        for name, value in part.items():
            grouped.setdefault(name, []).append(as_metric(value))
    return grouped


def reduce_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, Metric]:
    """Join micro-batches and ranks of one mini-batch: sums add up, means are weighted."""
    return {name: _join(values, across_steps=False) for name, values in _by_name(parts).items()}


def average_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Join mini-batches and epochs of one step into plain numbers: sums are averaged, extremes kept."""
    return {name: float(_join(values, across_steps=True).value) for name, values in _by_name(parts).items()}


class Timer:
    """Collects the seconds of named spans of a step, which are phases of the process; one that raises is counted too.

    >>> timer = Timer()
    >>> with timer("gen"):
    ...     pass
    >>> sorted(timer.metrics())
    ['timing_s/gen']
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            with live.phase(name):
                yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}

    def reset(self) -> None:
        self.seconds.clear()
