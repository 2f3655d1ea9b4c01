"""Which calls have no result yet, and which of them a thread waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable


class PendingCalls:
    """Every method is called with `changed` held. A waiting thread is woken once, when its last call has ended, however
    many others end meanwhile."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._keys: set[Hashable] = set()
        self._waited: list[set[Hashable]] = []

    def add(self, key: Hashable) -> None:
        self._keys.add(key)

    def end(self, key: Hashable) -> None:
        for keys in (self._keys, *self._waited):
            keys.discard(key)
        if not all(self._waited):
            self._changed.notify_all()

    def wait(self, keys: Collection[Hashable] | None, failed: Callable[[], bool]) -> None:
        """Return when these calls (None: all, those added meanwhile included) have ended, or `failed()`."""
        waited = self._keys if keys is None else self._keys.intersection(keys)
        self._waited.append(waited)
        try:
            self._changed.wait_for(lambda: not waited or failed())
        finally:
            self._waited = [each for each in self._waited if each is not waited]
