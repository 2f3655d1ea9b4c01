"""Numbers of this process that change during a step: what it does, how many sequences run, how many tokens were drawn.

Schedulers, trainers, reward pools and tools write with plain assignments: no lock, no file, no message. Readers (the
metrics endpoint, the progress line) take a `snapshot`. Every number has one writing thread.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class LiveMetric:
    """A number Prometheus can ask for, under `verl_` and its name."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    label: str = ""
    """What a histogram is divided by."""


METRICS: dict[str, LiveMetric] = {
    "step": LiveMetric("gauge", "Newest complete training step"),
    "steps_total": LiveMetric("counter", "Training steps completed"),
    "last_step_timestamp_seconds": LiveMetric("gauge", "Unix time at which the newest step was complete"),
    "sequences_running": LiveMetric("gauge", "Sequences being generated"),
    "sequences_waiting": LiveMetric("gauge", "Sequences submitted and not yet started"),
    "kv_blocks_used": LiveMetric("gauge", "Blocks of the KV cache in use"),
    "kv_blocks": LiveMetric("gauge", "Blocks of the KV cache"),
    "generated_tokens_total": LiveMetric("counter", "Tokens drawn"),
    "prefilled_tokens_total": LiveMetric("counter", "Prompt tokens computed"),
    "preemptions_total": LiveMetric("counter", "Sequences that gave their KV blocks back and started again"),
    "responses_total": LiveMetric("counter", "Responses finished"),
    "responses_wanted": LiveMetric("gauge", "Responses the running generation was asked for"),
    "responses_done": LiveMetric("gauge", "Responses of the running generation that are finished"),
    "longest_response_tokens": LiveMetric("gauge", "Tokens of the longest response being generated"),
    "rewards_waiting": LiveMetric("gauge", "Rewards asked for and not yet computed"),
    "rewards_total": LiveMetric("counter", "Rewards computed, those that failed included"),
    "rewards_failed_total": LiveMetric("counter", "Rewards whose function failed or timed out"),
    "tool_calls_waiting": LiveMetric("gauge", "Tool calls without an answer yet"),
    "tool_calls_total": LiveMetric("counter", "Tool calls answered, those that failed included"),
    "tool_calls_failed_total": LiveMetric("counter", "Tool calls that failed or timed out"),
    "sample_age": LiveMetric(
        "gauge", "Updates between the oldest token of the newest batch and its training"
    ),
    "phase_seconds": LiveMetric("histogram", "Duration of phases of a step", SECONDS, label="phase"),
    "response_length_tokens": LiveMetric("histogram", "Length of responses", TOKENS),
}


_UNKNOWN_AT_START = ("step", "last_step_timestamp_seconds", "kv_blocks_used", "kv_blocks", "sample_age")
_FROM_START = [
    name for name, each in METRICS.items() if each.kind != "histogram" and name not in _UNKNOWN_AT_START
]
"""Numbers that are 0, not absent, before anything has happened."""


@dataclass
class Snapshot:
    """The numbers of one process at one moment; plain data that travels between processes."""

    process: str = "controller"
    values: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Unix times at which the running phases began, the innermost last."""
    histograms: dict[tuple[str, str], tuple[list[int], float]] = field(default_factory=dict)
    """By name and label: counts per bucket, those above the last bound included, and the sum of the values."""


class Live:
    """The table of one process."""

    def __init__(self) -> None:
        self.process = "controller"
        self.values: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.step = 0
        """The training step that phases belong to."""
        self.others: Callable[[], list[Snapshot]] = list
        """The newest snapshots of the run's other processes; may be called from any thread."""
        self._histograms: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
        self._spans: int | None = None

    def begin_run(self) -> None:
        """A run begins in this process: everything that can be counted is 0."""
        self.process, self.step, self.others = "controller", 0, list
        self._histograms.clear()
        self.values.clear()
        self.values.update(dict.fromkeys(_FROM_START, 0.0))

    def begin_step(self, step: int) -> None:
        self.step = step

    def end_step(self, step: int) -> None:
        """This training step is complete."""
        self.set("step", step)
        self.add("steps_total")
        self.set("last_step_timestamp_seconds", time.time())

    def set(self, name: str, value: float) -> None:
        self.values[name] = value

    def add(self, name: str, value: float = 1.0) -> None:
        self.values[name] = self.values.get(name, 0.0) + value

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Count a value in a histogram."""
        bounds = METRICS[name].bounds
        counts, total = self._histograms.setdefault((name, label), ([0] * (len(bounds) + 1), [0.0]))
        counts[bisect_left(bounds, value)] += 1
        total[0] += value

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this process does inside the block. Phases nest; several threads may have their own."""
        start = time.time()
        self.phases[name] = start
        try:
            yield
        finally:
            self.phases.pop(name, None)
            end = time.time()
            self.observe("phase_seconds", end - start, name)
            if self._spans is not None:
                span = {"name": name, "start": start, "end": end, "step": self.step}
                with suppress(OSError):
                    os.write(self._spans, (json.dumps(span) + "\n").encode())

    def record_phases(self, path: Path | None, process: str = "controller") -> None:
        """Append every phase that ends to this file, a line of JSON each; None: no longer."""
        self.process = process
        if self._spans is not None:
            os.close(self._spans)
            self._spans = None
        if path is not None:
            with suppress(OSError):  # a run does not depend on it
                path.parent.mkdir(parents=True, exist_ok=True)
                self._spans = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def snapshot(self) -> Snapshot:
        """A copy. Writers continue meanwhile: numbers of one snapshot may be microseconds apart."""
        histograms = {
            key: (list(counts), total[0]) for key, (counts, total) in list(self._histograms.items())
        }
        return Snapshot(self.process, dict(self.values), dict(self.phases), histograms)

    def everything(self) -> list[Snapshot]:
        """Of all processes of the run, this one first."""
        return [self.snapshot(), *self.others()]


live = Live()
"""The table of this process."""
