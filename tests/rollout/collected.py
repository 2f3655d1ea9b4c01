"""Drives a sampler by hand, for tests that interrupt it."""

from __future__ import annotations

import itertools
from typing import Any

from verl.data.proto import DataProto
from verl.rollout.base import GenerationSettings
from verl.rollout.sampler import Sampler
from verl.rollout.samples import Finished, Kept


class Collected:
    """What a sampler delivers."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.finished: list[Finished] = []

    def add(
        self, prompts: DataProto, settings: GenerationSettings, prefix: str = "", kept: Kept | None = None
    ) -> None:
        self.sampler.add(prompts, settings, self.finished.append, prefix, kept)

    def steps(self, count: int = 1) -> None:
        """So many polls of the engine, fewer where it has nothing to do."""
        poll_s, self.sampler.poll_s = self.sampler.poll_s, 0.0
        polled = itertools.count()
        self.sampler.run(lambda: next(polled) >= count or not self.sampler._sent)
        self.sampler.poll_s = poll_s

    def drain(self) -> Any:
        """Everything that ends, to the last."""
        if self.sampler.outstanding:
            self.sampler.run(lambda: not self.sampler.outstanding)
        return self.finished
