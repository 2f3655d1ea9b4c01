"""Metrics that know how they are reduced, whatever their names; timers and profiles of steps.

`reduce_metrics` joins the parts of one mini-batch (micro-batches, ranks); `average_metrics` joins
mini-batches and epochs into one figure per training step. A part's value may be a zero-dimensional
tensor on the device, so that collecting metrics does not wait for the device.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl.observe.live import live

if TYPE_CHECKING:
    from verl.config.sections.trainer import ProfileConfig

logger = logging.getLogger(__name__)

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


def _join(parts: list[Metric], across_steps: bool) -> Metric:
    kind = parts[0].reduce
    if any(part.reduce != kind for part in parts):
        raise ValueError(f"one metric, several reductions: {sorted({part.reduce for part in parts})}")
    values = [float(part.value) for part in parts]
    weights = [float(part.weight) for part in parts]
    if kind in ("max", "min"):
        return Metric(max(values) if kind == "max" else min(values), kind)
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
            grouped.setdefault(name, []).append(value if isinstance(value, Metric) else Metric(value))
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


@contextmanager
def profiled(cfg: ProfileConfig, step: int, rank: int, run_folder: Path) -> Iterator[dict[str, float]]:
    """Write a trace of torch's profiler around the block where `cfg` (`trainer.profile`) chooses this step and rank. A
    block that raises leaves no trace; a profiler that fails loses its trace, never the step.

    The profiler sees the thread that enters the block, and the backward passes that this thread starts. Yields what is
    empty until the block has ended: then, where the process used a GPU, it has `perf/gpu_busy`."""
    measured: dict[str, float] = {}
    if step not in cfg.steps or rank not in cfg.ranks:
        yield measured
        return
    profiler = _start()
    began = time.perf_counter()
    try:
        yield measured
    except BaseException:
        if profiler is not None:
            _stop(profiler, None)
        raise
    if profiler is not None:
        seconds = time.perf_counter() - began  # without writing the trace
        _stop(profiler, run_folder / "profile" / f"step_{step}_rank_{rank}.json.gz")
        measured |= _gpu_busy(profiler, seconds)


def _start() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():  # else it would take memory of a GPU that the run does not use
        activities.append(ProfilerActivity.CUDA)
    try:
        profiler = profile(activities=activities)
        profiler.start()
    except Exception as error:  # of drivers and of another profiler in this process
        logger.warning("torch's profiler could not start: %s. The step is not profiled", error)
        return None
    return profiler


def _stop(profiler: Any, file: Path | None) -> None:
    try:
        profiler.stop()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}")  # its suffix makes torch compress it
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, file)
            logger.info("profile: %s", file)
    except Exception as error:  # a full disk, and whatever the profiler meets
        logger.warning("the profile of a step could not be written: %s. The run continues", error)


def _gpu_busy(profiler: Any, seconds: float) -> dict[str, float]:
    """The share of `seconds` in which kernels or copies ran on the GPU; nothing where none did."""
    from torch.autograd import DeviceType

    try:
        events = profiler.profiler.kineto_results.events()
        spans = [
            (event.start_ns(), event.end_ns()) for event in events if event.device_type() == DeviceType.CUDA
        ]
    except Exception as error:  # torch's own, not its public interface
        logger.warning("the profile does not say how busy the GPU was: %s", error)
        return {}
    return {"perf/gpu_busy": covered(spans) / 1e9 / seconds} if spans else {}


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length that (start, end) cover together: what overlaps counts once."""
    total, until = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
