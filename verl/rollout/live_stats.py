"""An engine's counts in the live table of its process (`verl.observe.live`), written by the thread that polls it."""

from __future__ import annotations

import time
from collections.abc import Callable

from verl.observe.live import live
from verl.rollout.base import RolloutStats

LIVE_S = 0.05
"""Between two updates while it generates: nothing to a step, and current to a reader."""


class LiveStats:
    """What one engine has written."""

    def __init__(self) -> None:
        self._written = 0.0
        self._before = RolloutStats()

    def write(self, stats: Callable[[], RolloutStats], *, now: bool = False) -> None:
        """After a step. `now`: also where the last update was a moment ago."""
        clock = time.monotonic()
        if not now and clock - self._written < LIVE_S:
            return
        self._written = clock
        new, old = stats(), self._before
        self._before = new
        live.set("sequences_running", new.running)
        live.set("sequences_waiting", new.waiting)
        live.set("longest_response_tokens", new.longest)
        if new.kv_blocks:
            live.set("kv_blocks", new.kv_blocks)
        live.set("kv_blocks_used", new.kv_blocks_used)
        # Differences: the counters of a process outlive its engines.
        live.add("generated_tokens_total", max(new.drawn_tokens - old.drawn_tokens, 0))
        live.add("prefilled_tokens_total", new.prefilled_tokens - old.prefilled_tokens)
        live.add("preemptions_total", new.preemptions - old.preemptions)
