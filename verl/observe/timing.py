"""Seconds of named spans of a step, as `timing_s/{name}`; a span that raises is counted too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Collects the seconds of one step.

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
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}

    def reset(self) -> None:
        self.seconds.clear()
