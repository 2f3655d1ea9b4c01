"""A deadline for users' code that stands still while the code waits for the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class OwnTime:
    """So many seconds between two answers of the policy. To be used as `async with own_time.limit():`, which ends with
    TimeoutError."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline: asyncio.Timeout | None = None
        self._waiting = 0

    def limit(self) -> asyncio.Timeout:
        self._deadline = asyncio.timeout(self.seconds)
        return self._deadline

    @property
    def running(self) -> bool:
        return self._deadline is not None

    @property
    def expired(self) -> bool:
        return self._deadline is not None and self._deadline.expired()

    def end(self) -> None:
        """What waits from now on has no deadline any more."""
        self._deadline = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The code waits for the policy, or for calls with a deadline of their own."""
        self._waiting += 1
        self._set()
        try:
            yield
        finally:
            self._waiting -= 1
            self._set()

    def _set(self) -> None:
        if self._deadline is not None and not self._deadline.expired():
            now = asyncio.get_running_loop().time()
            self._deadline.reschedule(None if self._waiting else now + self.seconds)
