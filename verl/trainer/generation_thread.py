"""Drives a stream of samples in a thread, so that a pool generates while the trainer trains."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from verl.data.proto import DataProto
from verl.errors import TrainingHalted
from verl.rollout.base import GenerationSettings
from verl.rollout.samples import Finished, SampleStream
from verl.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
POLL_S = 0.05
"""How soon samples that were added are submitted while others run."""


class GenerationThread:
    """The thread alone uses the stream. `on_finish` is called in it for every sample that ends.

    `changed` guards what that callback and the trainer's thread share; it is notified after every sample."""

    def __init__(self, workers: WorkerGroup, on_finish: Callable[[Finished], None], notice_s: float) -> None:
        self.changed = threading.Condition()
        self.idle_s = 0.0
        """Seconds without a sample to generate."""
        self._workers, self._on_finish, self._notice_s = workers, on_finish, notice_s
        self._stream: SampleStream | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._outstanding = 0
        self._finished = 0
        self._closing = False
        self._error: BaseException | None = None

    @property
    def stream(self) -> SampleStream:
        if self._stream is None:
            self._stream = self._workers.samples()
        return self._stream

    @property
    def idle(self) -> bool:
        return self._outstanding == 0

    def add(self, prompts: DataProto, settings: GenerationSettings, prefix: str = "") -> None:
        with self.changed:
            self._inbox.append(partial(self.stream.add, prompts, settings, prefix))
            self._outstanding += len(prompts) * settings.n
            self.changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="verl-generation", daemon=True)
            self._thread.start()

    def wait(self, done: Callable[[], bool], describe: Callable[[], str] = lambda: "") -> None:
        """Until `done()`, asked under `changed` after every sample; raises what ended the thread. Where no sample ends
        for `trainer.watchdog_s`, the log says what is waited for (a process that hangs or dies is an error)."""
        with self.changed:
            since, finished = time.monotonic(), self._finished
            while not done():
                if self._error is not None:
                    raise self._error
                if self._finished != finished:
                    since, finished = time.monotonic(), self._finished
                elif time.monotonic() - since > self._notice_s:
                    since = time.monotonic()
                    logger.warning(
                        "the trainer waits for generation: no response has ended for %.0f s. %d samples are "
                        "outstanding. %s",
                        self._notice_s,
                        self._outstanding,
                        describe(),
                    )
                self.changed.wait(min(1.0, self._notice_s))

    def wait_until_idle(self, *, or_failed: bool = False) -> None:
        self.wait(lambda: self.idle or (or_failed and self.failed))

    @property
    def failed(self) -> bool:
        return self._error is not None

    def between_polls(self, function: Callable[[], Result]) -> Result:
        """Call it in the thread, when that does not use the stream; here, where the thread does not run (any more)."""
        found: list[Result] = []
        with self.changed:
            if self._thread is not None:
                self._inbox.append(lambda: found.append(function()))
                self.changed.notify_all()
                self.wait(lambda: bool(found) or self.failed)
            return found[0] if found else function()

    def close(self) -> None:
        """End what is outstanding. Raises nothing."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ---- in the thread

    def _run(self) -> None:
        error: BaseException = TrainingHalted("generation has ended")
        try:
            with self._workers.generating():
                try:
                    self._serve()
                finally:
                    self.stream.abort()
        except BaseException as problem:  # raised in the trainer's thread by `wait`
            error = problem
        with self.changed:
            self._error = error
            self.changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self.changed:
                started = time.monotonic()
                while self.idle and not self._inbox and not self._closing:
                    self.changed.wait()
                    self.idle_s += time.monotonic() - started
                    started = time.monotonic()
                if self._closing:
                    return
                arrived = list(self._inbox)
                self._inbox.clear()
            for each in arrived:
                each()
                with self.changed:
                    self.changed.notify_all()
            for finished in self.stream.poll(POLL_S):
                self._on_finish(finished)
                with self.changed:
                    self._outstanding -= 1
                    self._finished += 1
                    self.changed.notify_all()
