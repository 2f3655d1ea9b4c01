"""Batches of a pool that generates while the trainer trains (`one_step_off`, `fully_async`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from verl.data.proto import DataProto
from verl.errors import TrainingHalted
from verl.observe.metrics import Timer
from verl.rollout.base import GenerationSettings
from verl.trainer.streaming import VALIDATION, StreamingExperience
from verl.workers.roles import OnFinish, rollouts_of

logger = logging.getLogger(__name__)

_SHOWN = 4


class PoolExperience(StreamingExperience):
    """A pool generates while the trainer trains: a thread drives the sampler. `sampler.changed` guards what its
    callback and the trainer's thread share.

    `fully_async`: weights go to the pool right after an update, between two of its decode steps. `one_step_off`: they
    wait until the batch in progress is complete, so that every batch is drawn by one version."""

    def __init__(self, *parts: Any, total_steps: int) -> None:
        super().__init__(*parts, total_steps=total_steps)
        self.whole_batches = self.cfg.trainer.async_training.mode == "one_step_off" and self.staleness > 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self._error: BaseException | None = None
        """What ended the thread."""
        self._metrics: dict[str, float] = {}
        self._measured = time.monotonic(), 0.0

    # ---- the thread that generates

    def _generate(self) -> None:
        error: BaseException = TrainingHalted("generation has ended")
        try:
            with self.workers.generating():
                try:
                    self.sampler.run(lambda: self._closing, serve=True)
                finally:
                    self.sampler.abort()
        except BaseException as problem:  # raised in the trainer's thread by `wait`
            error = problem
        with self.sampler.changed:
            self._error = error
            self.sampler.changed.notify_all()

    def wait(self, done: Callable[[], bool], describe: Callable[[], str] = lambda: "") -> None:
        """Until `done()`, asked under the lock after every sample; raises what ended the thread. Where no sample ends
        for `trainer.watchdog_s`, the log says what is waited for (a process that hangs or dies is an error)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._generate, name="verl-generation", daemon=True)
            self._thread.start()
        notice_s = self.cfg.trainer.watchdog_s
        with self.sampler.changed:
            since, ended = time.monotonic(), self.sampler.ended
            while not done():
                if self._error is not None:
                    raise self._error
                if self.sampler.ended != ended:
                    since, ended = time.monotonic(), self.sampler.ended
                elif time.monotonic() - since > notice_s:
                    since = time.monotonic()
                    logger.warning(
                        "the trainer waits for generation: no response has ended for %.0f s. %d samples are "
                        "outstanding. %s",
                        notice_s,
                        self.sampler.outstanding,
                        describe(),
                    )
                self.sampler.changed.wait(min(1.0, notice_s))

    def wait_until_idle(self, *, or_failed: bool = False) -> None:
        self.wait(
            lambda: (
                all(group.complete for group in self.groups.values())
                or (or_failed and self._error is not None)
            )
        )

    def close(self) -> None:
        """End what is outstanding. Raises nothing."""
        with self.sampler.changed:
            self._closing = True
            self.sampler.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ---- steps

    def collect(self, step: int, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        started = time.monotonic()
        with timer("gen"):
            if not self.whole_batches or self.restored or not self.groups:
                self.start_groups()
            self.wait(self.take_groups, lambda: f"Step {step} needs {self._missing()}")
            waited = time.monotonic() - started
            if self.whole_batches:
                self.send_deferred()
                self.start_groups()
        batch, metrics = self.batch_of(timer)
        found, self._metrics = self._metrics, {}
        return batch, metrics | found | self._wait_shares(waited)

    def _missing(self) -> str:
        missing = self.admission.waiting_for(self.clock)
        shown = [
            f"{name} ({sum(sample is not None for sample in self.groups[name].samples)} of {self.n} samples ended)"
            for name in missing[:_SHOWN]
        ]
        return ", ".join(shown) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")

    def _wait_shares(self, waited: float) -> dict[str, float]:
        """Of the time since the last batch."""
        (since, idle), now = self._measured, time.monotonic()
        self._measured = now, self.sampler.idle_s
        span = max(now - since, 1e-9)
        return {
            "perf/wait_share/trainer": waited / span,
            "perf/wait_share/generation": (self.sampler.idle_s - idle) / span,
        }

    def weights_changed(self, step: int) -> dict[str, float]:
        if self.whole_batches or step % self.cfg.trainer.async_training.sync_every:
            return {}
        return self.send_weights(step)

    def send_deferred(self) -> None:
        """Send weights that the pool does not have yet; `one_step_off` completes its batch first."""
        if self.whole_batches:
            self.wait_until_idle()
        if self.sent != self.workers.policy_version:
            self._metrics |= self.send_weights(self.clock)

    def generate_beside(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish
    ) -> DataProto:
        self.send_deferred()
        samples = self.sampler.collect(prompts, settings, on_finish, VALIDATION, self.wait)
        return rollouts_of(prompts, samples, settings.n, self.workers.pad_token_id)

    def state_dict(self) -> dict[str, Any]:
        # What ended the thread is raised by the next `collect`: the complete step must be saved first.
        if self.whole_batches:
            self.wait_until_idle(or_failed=True)
        return super().state_dict()
