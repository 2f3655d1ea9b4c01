"""Waiting for an engine in other processes for as long as it makes progress.

Whoever waits is released when the engine has died, or when nothing has come from it for `watchdog_s` seconds: no
answer, no token, no bucket of weights taken. A hung engine is killed with everything it started.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from verl.errors import RESUME, EngineLost, RolloutError
from verl.watchdog import beat

POLL_S = 0.25
DYING_S = 10.0
"""How long an engine may take to end after it failed."""

Result = TypeVar("Result")
Item = TypeVar("Item")
Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class WatchedProcesses(Protocol):
    """An engine's processes."""

    name: str

    def check(self) -> None:
        """EngineLost when one of them has ended."""

    def describe(self) -> str:
        """What each of them does now."""

    def log_tail(self) -> str:
        """The end of their log after a heading; empty without a log."""

    def kill(self) -> None:
        """Kill all of them."""


class ServerWatchdog:
    """Watches one engine's processes while somebody waits for them."""

    def __init__(
        self,
        processes: WatchedProcesses,
        watchdog_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.processes, self.watchdog_s, self._clock = processes, watchdog_s, clock
        self._last_beat = self._clock()
        self._busy_here = 0
        self._lost: EngineLost | None = None
        self._lock = threading.Lock()
        self._calls: Calls | None = None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def beat(self) -> None:
        """The engine made progress."""
        self._last_beat = self._clock()
        beat()

    def while_taken(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items the engine waits for: producing one is our time, asking for the next is its progress."""
        iterator = iter(items)
        while True:
            self._busy_here += 1
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._busy_here -= 1
                self.beat()
            yield item

    def check(self, what: str) -> None:
        """EngineLost when the engine has died, or made no progress for too long in `what`."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                self.processes.check()
            except EngineLost as error:
                self._lost = error
                raise
            if self._busy_here or self._clock() - self._last_beat <= self.watchdog_s:
                return
            self._lost = EngineLost(
                f"{self.processes.name} made no progress for {self.watchdog_s:g} s (trainer.watchdog_s) while the "
                f"trainer (process {os.getpid()}) waited for it in {what}: {self.processes.describe()}. It was killed; "
                f"{RESUME}. If the work takes longer, raise trainer.watchdog_s.{self.processes.log_tail()}"
            )
            beat()  # whoever watches this process hears of it now
            self.processes.kill()
            raise self._lost

    def call(self, what: str, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)` in a thread, which may never return; one at a time."""
        answer: Future[Result] = Future()
        with self._lock:
            if self._calls is None:
                self._calls = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(self._calls,), name="verl-engine", daemon=True).start()
        self._last_beat = self._clock()
        self._calls.put((answer, lambda: function(*args)))
        while not wait([answer], POLL_S).done:
            self.check(what)
        self.beat()
        return answer.result()

    def explain(self, error: RolloutError, is_well: Callable[[], bool]) -> None:
        """After an error: raise EngineLost if the engine is dying, which may take it a moment."""
        deadline = time.monotonic() + DYING_S
        while not is_well():
            self.check("its last answer")
            if time.monotonic() > deadline:
                self._lost = EngineLost(
                    f"{self.processes.name} does not work any more: {error}; {RESUME}.{self.processes.log_tail()}"
                )
                self.processes.kill()
                raise self._lost from error
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            if self._calls is not None:
                self._calls.put(None)
                self._calls = None


def _serve(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        answer, function = call
        try:
            answer.set_result(function())
        except BaseException as error:  # for whoever asked
            answer.set_exception(error)
        del call, answer, function
