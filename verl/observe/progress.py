"""What a running step does now, as one line of text, from the live tables of all processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from verl.observe.live import Snapshot, live

RATE_S = 10.0
"""Tokens per second are those of the last so many seconds."""
_OUTER = "step"
"""The phase that contains the others."""


class StepProgress:
    """Called by one thread, every few seconds or more often."""

    def __init__(
        self,
        snapshots: Callable[[], list[Snapshot]] = live.everything,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._snapshots, self._clock = snapshots, clock
        self._drawn: deque[tuple[float, float]] = deque()

    def line(self) -> str:
        """`gen 42 s  63/128 responses  1,234 tok/s  waiting for 3 sequences ...`; empty where nothing runs."""
        snapshots, now = self._snapshots(), self._clock()
        rate = self._rate(_sum(snapshots, "generated_tokens_total"), now)
        phases = [(name, since) for name, since in snapshots[0].phases.items() if name != _OUTER]
        if not phases:
            return ""
        name, since = phases[-1]
        parts = [f"{name} {max(now - since, 0):.0f} s"]
        running = _sum(snapshots, "sequences_running")
        wanted, done = _sum(snapshots, "responses_wanted"), _sum(snapshots, "responses_done")
        if name == "gen" or running:
            if wanted:
                parts.append(f"{min(done, wanted):,.0f}/{wanted:,.0f} responses")
            parts.append(f"{rate:,.0f} tok/s")
        waiting = waits(snapshots)
        return "  ".join(parts) + (f"  waiting for {', '.join(waiting)}" if waiting else "")

    def _rate(self, tokens: float, now: float) -> float:
        self._drawn.append((now, tokens))
        while len(self._drawn) > 2 and self._drawn[1][0] <= now - RATE_S:
            self._drawn.popleft()
        since, before = self._drawn[0]
        return max(tokens - before, 0.0) / (now - since) if now > since else 0.0


def waits(snapshots: list[Snapshot]) -> list[str]:
    """What has to end before the phase does."""
    found = []
    running = _sum(snapshots, "sequences_running")
    if running:
        longest = max(each.values.get("longest_response_tokens", 0.0) for each in snapshots)
        known = f", the longest with {longest:,.0f} tokens" if longest else ""
        found.append(f"{_count(running, 'response')} being generated{known}")
    for name, what in (
        ("sequences_waiting", "sequence not yet started"),
        ("tool_calls_waiting", "tool call"),
        ("rewards_waiting", "reward"),
    ):
        number = _sum(snapshots, name)
        if number > 0:
            found.append(_count(number, what))
    return found


def _sum(snapshots: list[Snapshot], name: str) -> float:
    return sum(each.values.get(name, 0.0) for each in snapshots)


def _count(number: float, what: str) -> str:
    noun, _, rest = what.partition(" ")
    if number != 1:
        if noun == "tool":
            rest += "s"
        else:
            noun += "s"
    return f"{number:,.0f} {noun} {rest}".rstrip()
