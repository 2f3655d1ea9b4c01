"""Timers that add to a dict of seconds. Their home is `verl.observe.metrics`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from verl.missing_names import explain
from verl.observe.metrics import Timer


def simple_timer(name: str, timing_raw: dict[str, float]) -> AbstractContextManager[None]:
    """Add the seconds of the block to `timing_raw[name]`; it is also a phase in the trace of the run."""
    timer = Timer()
    timer.seconds = timing_raw
    return timer(name)


def marked_timer(
    name: str,
    timing_raw: dict[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> AbstractContextManager[None]:
    """The same; the trace chooses its colours itself."""
    return simple_timer(name, timing_raw)


__getattr__ = explain(__name__)
