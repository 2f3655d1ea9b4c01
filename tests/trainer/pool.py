"""A worker group whose rollout engine has its own copy of the weights, as a pool has, in this process.

What the trainer's thread and the generation thread do at once is real; what Ray adds is tested with the real Ray in
`tests/workers/test_async_pools.py`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.rollout import build_rollout
from verl.rollout.base import Request, Response, RolloutEngine, RolloutStats
from verl.rollout.source import ModuleWeights
from verl.workers.local import LocalGroup

SLICE_S = 0.0
"""A poll lasts one scheduling iteration, so that weights can be taken between two."""


class SharedEngine(RolloutEngine):
    """An engine that one thread polls while another gives it weights, between two decode steps."""

    def __init__(self, engine: RolloutEngine, module: torch.nn.Module) -> None:
        self.engine, self.module = engine, module
        self.lock = threading.RLock()
        self.before_poll: Callable[[], None] = lambda: None

    def submit(self, requests: Iterable[Request]) -> None:
        with self.lock:
            self.engine.submit(requests)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        self.before_poll()
        with self.lock:
            return self.engine.poll(timeout_s if timeout_s is None else SLICE_S)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        with self.lock:
            self.engine.abort(request_ids)

    def release(self, prefix_ids: Iterable[str]) -> None:
        with self.lock:
            self.engine.release(prefix_ids)

    def update_weights(self, source: Any, version: int) -> None:
        with self.lock, source.module() as trained, torch.no_grad():
            for mine, theirs in zip(self.module.parameters(), trained.parameters(), strict=True):
                mine.copy_(theirs)
            self.engine.update_weights(ModuleWeights(self.module), version)

    def stats(self) -> RolloutStats:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()


class PoolGroup(LocalGroup):
    """Trains in this process and generates from a copy of the weights."""

    def build_rollout_engine(self, tokenizer: Any) -> RolloutEngine:
        rollout = copy.copy(self.cfg.actor_rollout_ref.rollout)
        with self.actor_engine.weights().module() as module:
            copied = copy.deepcopy(module).requires_grad_(False)
        return SharedEngine(build_rollout(rollout.name, copied, tokenizer, rollout, watchdog_s=60), copied)

    @contextmanager
    def generating(self) -> Iterator[None]:
        yield
