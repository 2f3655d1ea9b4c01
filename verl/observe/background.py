"""Calls a tracker of another project from a thread of its own: one that is slow, raises or never returns does not hold
up the run, nor the end of the process.

Every call that was accepted reaches the tracker in order, unless it fails or does not finish within `CLOSE_S`."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Calls that wait for a tracker; one that is so far behind is given up."""
CLOSE_S = 120.0
"""How long the end of a run waits for a tracker to send the rest."""

_given_up: set[str] = set()


class Tracker(Protocol):
    """Takes the metrics of a step and, where it can show them, samples of validation. A subclass inherits that nothing
    is done with samples and at the end."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        return None


class Service(Protocol):
    """Takes the numbers of a step and samples of validation (one row at least)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: list[Any]) -> None: ...

    def close(self, failed: bool) -> None:
        """`failed`: the run ended with an error."""


class Background(Tracker):
    """A tracker that feeds a service. What the service raised is raised by the next call."""

    def __init__(self, name: str, service: Service) -> None:
        self._name = name
        self._service = service
        self._error: BaseException | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = numbers(metrics)
        self._put(lambda: self._service.log(step, values))

    def log_samples(self, step: int, rows: list[Any]) -> None:
        if rows:
            kept = list(rows)
            self._put(lambda: self._service.log_samples(step, kept))

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # called while an error ends the run
        self._put(lambda: self._service.close(failed))
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _given_up.add(self._name)
            raise TimeoutError(f"it did not end within {CLOSE_S:.0f} s")
        self._raise_error()

    def _put(self, call: Callable[[], None] | None) -> None:
        self._raise_error()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            _given_up.add(self._name)
            raise TimeoutError(f"it is {MAX_WAITING} calls behind") from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:  # SystemExit too: no exception of another project may end the run
            _given_up.add(self._name)
            self._error = error
            with suppress(BaseException):
                self._service.close(failed=False)


def leave_given_up(code: int) -> None:
    """End the process if a tracker was given up: its threads and exit handlers could wait for ever.

    Called when everything else is closed."""
    if _given_up:
        logger.info("not waiting for %s", ", ".join(sorted(_given_up)))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of the metrics that a float can hold."""
    found = {}
    for name, value in metrics.items():
        with suppress(OverflowError):  # an integer above what a float can hold
            if isinstance(value, (int, float)):
                found[name] = float(value)
    return found
