"""Waiting for an engine that lives in other processes, for as long as it gives signs of life.

What always holds: whoever waits is released as soon as the engine is gone, or when nothing has come from it for
`watchdog_s` seconds: no answer, no token, no bucket of weights taken. How long a generation takes does not matter. A
silent engine is killed with everything it started, so that nobody stays behind and nobody answers late.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from verl.errors import RESUME, EngineLost, RolloutError
from verl.observe import life

POLL_S = 0.25
DYING_S = 10.0
"""How long an engine may take to end after it said that it cannot go on."""

Result = TypeVar("Result")
Item = TypeVar("Item")
Errands = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Guarded(Protocol):
    """An engine's processes."""

    name: str
    """What messages call them."""

    def check(self) -> None:
        """EngineLost when they, or one of them, have ended."""

    def describe(self) -> str:
        """What each of them does right now."""

    def last_lines(self) -> str:
        """The end of their log, after a line that says so; empty where they have none."""

    def kill(self) -> None:
        """End them at once."""


class Guard:
    """Watches over one engine's processes while somebody waits for them."""

    def __init__(
        self, processes: Guarded, watchdog_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.processes, self.watchdog_s, self._clock = processes, watchdog_s, clock
        self._heard = self._clock()
        self._waiting = self._busy_here = 0
        self._lost: EngineLost | None = None
        self._lock = threading.Lock()
        self._errands: Errands | None = None

    @property
    def lost(self) -> bool:
        """Whether it is known that the engine answers no more."""
        return self._lost is not None

    def sign(self) -> None:
        """The engine has done something for us."""
        self._heard = self._clock()
        life.beat()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around waiting; silence counts from here on."""
        with self._lock:
            if not self._waiting:
                self._heard = self._clock()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def while_taken(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items the engine waits for in its turn: making one is our time, that the next is wanted is its sign."""
        iterator = iter(items)
        while True:
            self._busy_here += 1
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._busy_here -= 1
                self.sign()
            yield item

    def check(self, what: str) -> None:
        """Raise EngineLost when the engine is gone, or has been silent for too long in `what`."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                self.processes.check()
            except EngineLost as error:
                self._lost = error
                raise
            if self._busy_here or self._clock() - self._heard <= self.watchdog_s:
                return
            self._lost = EngineLost(
                f"{self.processes.name} gave no sign of life for {self.watchdog_s:g} s (trainer.watchdog_s) while the "
                f"trainer (process {os.getpid()}) waited for it in {what}: {self.processes.describe()}. It was killed. "
                f"The run ends here; {RESUME}. If the work really takes longer, raise trainer.watchdog_s."
                f"{self.processes.last_lines()}"
            )
            life.beat()  # whoever watches this process hears of it now
            self.processes.kill()
            raise self._lost

    def ask(self, what: str, function: Callable[..., Result], *args: Any) -> Result:
        """`function(*args)` in a thread beside, which may never come back; one at a time."""
        answer: Future[Result] = Future()
        with self._lock:
            if self._errands is None:
                self._errands = queue.SimpleQueue()
                threading.Thread(target=_run, args=(self._errands,), name="verl-guard", daemon=True).start()
        self._errands.put((answer, lambda: function(*args)))
        with self.waiting():
            while not wait([answer], POLL_S).done:
                self.check(what)
        self.sign()
        return answer.result()

    def explain(self, error: RolloutError, is_well: Callable[[], bool]) -> None:
        """After an error: raise EngineLost if the engine is dying, which may take it a moment; else nothing."""
        deadline = time.monotonic() + DYING_S
        while not is_well():
            self.check("its last answer")
            if time.monotonic() > deadline:
                self._lost = EngineLost(
                    f"{self.processes.name} does not work any more: {error}. The run ends here; {RESUME}."
                    f"{self.processes.last_lines()}"
                )
                self.processes.kill()
                raise self._lost from error
            time.sleep(POLL_S)

    def close(self) -> None:
        """Let the thread go."""
        with self._lock:
            if self._errands is not None:
                self._errands.put(None)
                self._errands = None


def _run(errands: Errands) -> None:
    while (errand := errands.get()) is not None:
        answer, call = errand
        try:
            answer.set_result(call())
        except BaseException as error:  # it belongs to whoever asked
            answer.set_exception(error)
        del errand, answer, call
