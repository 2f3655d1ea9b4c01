"""Batches of a pool that generates while the trainer trains (`one_step_off`, `fully_async`)."""

from __future__ import annotations

import time
from typing import Any

from verl.data.proto import DataProto
from verl.observe.live import live
from verl.observe.metrics import Timer
from verl.rollout.base import GenerationSettings
from verl.rollout.samples import Finished, SampleStream
from verl.trainer.admission import Admission
from verl.trainer.generation_thread import GenerationThread
from verl.trainer.streaming import VALIDATION, StreamingExperience

_SHOWN = 4


class PoolExperience(StreamingExperience):
    """A pool generates while the trainer trains.

    `fully_async`: weights go to the pool right after an update, between two of its decode steps. `one_step_off`: they
    wait until the batch in progress is complete, so that every batch is drawn by one version."""

    def __init__(self, *parts: Any, total_steps: int) -> None:
        super().__init__(*parts, total_steps=total_steps)
        trainer = self.cfg.trainer
        self.whole_batches = trainer.async_training.mode == "one_step_off" and self.staleness > 0
        self.thread = GenerationThread(self.workers, self.sample_ended, trainer.watchdog_s)
        self._metrics: dict[str, float] = {}
        self._measured = time.monotonic(), 0.0

    @property
    def stream(self) -> SampleStream:
        return self.thread.stream

    def new_admission(self, limit: int | None = None) -> Admission:
        # With whole batches one at a time: which prompts run together does not depend on what the clock says.
        one_step = self.cfg.trainer.async_training.mode == "one_step_off"
        return super().new_admission(self.batch_size if one_step else None)

    def add(self, prompts: DataProto, settings: GenerationSettings) -> None:
        self.thread.add(prompts, settings)

    def sample_ended(self, finished: Finished) -> None:
        """In the generation thread."""
        with self.thread.changed:
            super().sample_ended(finished)

    def collect(self, step: int, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        started = time.monotonic()
        with timer("gen"):
            if not self.whole_batches or self.restored or not self.groups:
                self.start_groups()
            names = self._wait_for_batch(step)
            waited = time.monotonic() - started
            if self.whole_batches:
                self.send_deferred()
                self.start_groups()
        batch, metrics = self.batch_of(names, timer)
        found, self._metrics = self._metrics, {}
        return batch, metrics | found | self._wait_shares(waited)

    def start_groups(self) -> None:
        with self.thread.changed:
            super().start_groups()

    def _wait_for_batch(self, step: int) -> list[str]:
        names: list[str] | None = None

        def done() -> bool:
            nonlocal names
            names = self.admission.take(self.clock)
            return names is not None

        self.thread.wait(done, lambda: f"Step {step} needs {self._missing()}")
        assert names is not None
        return names

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
        self._measured = now, self.thread.idle_s
        span = max(now - since, 1e-9)
        return {
            "perf/wait_share/trainer": waited / span,
            "perf/wait_share/generation": (self.thread.idle_s - idle) / span,
        }

    def weights_changed(self, step: int) -> dict[str, float]:
        if self.whole_batches or step % self.cfg.trainer.async_training.sync_every:
            return {}
        return self.send_weights(step)

    def send_deferred(self) -> None:
        """Send weights that the pool does not have yet; `one_step_off` completes its batch first."""
        if self.whole_batches:
            self.thread.wait_until_idle()
        if self.sent != self.workers.policy_version:
            self._metrics |= self.send_weights(self.clock)

    def score_beside(self, prompts: DataProto, settings: GenerationSettings, timer: Timer) -> DataProto:
        """Beside the training samples that are running."""
        with timer("gen"):
            self.send_deferred()
            self.thread.add(prompts, settings, VALIDATION)
            live.add("responses_wanted", len(prompts) * settings.n)
            self.thread.wait(lambda: len(self.validation) == len(prompts) * settings.n)
        return self.validated(prompts, settings, timer)

    def state_dict(self) -> dict[str, Any]:
        # What ended the thread is raised by the next `collect`: the complete step must be saved first.
        if self.whole_batches:
            self.thread.wait_until_idle(or_failed=True)
        self.collect_scores()  # before: generation goes on meanwhile
        return self.thread.between_polls(super().state_dict)

    def close(self) -> None:
        self.thread.close()
