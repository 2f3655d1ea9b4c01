"""What one process generates for the controller, piece by piece, and what of it was called off.

The controller numbers the pieces it deals out; word that something of one is no longer wanted there comes on another
lane, maybe before the piece itself.

What always holds: every sample of a piece is answered exactly once, those called off before they began with no tokens;
word that comes at any time is heeded, and word about another piece is not; after a piece, finished or left, its engine
generates nothing any more.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from verl.rollout.base import Request, Response, RolloutEngine

FLUSH_S = 0.02
"""A response that finishes this soon after others were sent travels with the next: sending takes a quarter of a
millisecond, in which nothing is generated."""


def unstarted(request: Request, version: int) -> list[Response]:
    """The answer to a request that was called off before it began."""
    return [Response(request.request_id, sample, [], [], "abort", version) for sample in range(request.n)]


class CalledOff:
    """Which requests are no longer wanted."""

    def __init__(self) -> None:
        self.everything = False
        self._ids: set[str] = set()

    def add(self, request_ids: Collection[str] | None) -> None:
        """None: all of them."""
        if request_ids is None:
            self.everything = True
        else:
            self._ids.update(request_ids)

    def __bool__(self) -> bool:
        return self.everything or bool(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return self.everything or request_id in self._ids

    def among(self, request_ids: Collection[str]) -> list[str] | None:
        """Those of them as `RolloutEngine.abort` takes them."""
        return None if self.everything else [name for name in request_ids if name in self._ids]


class Generating:
    """One process's pieces. `run` and `abort` are called from different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = -1
        self._off = CalledOff()
        self._engine: RolloutEngine | None = None
        self._open: Counter[str] = Counter()

    def abort(self, number: int, request_ids: Collection[str] | None) -> bool:
        """Samples of piece `number` are no longer wanted (None: all). False: the engine at work cannot stop early."""
        with self._lock:
            if number < self._number:
                return True
            self._reach(number)
            self._off.add(request_ids)
            return self._pass_on()

    def run(
        self, engine: RolloutEngine, requests: list[Request], number: int, version: int
    ) -> Iterator[list[Response]]:
        """The responses, a few at a time; `version` is that of the engine's weights."""
        with self._lock:
            self._reach(number)
            wanted = [request for request in requests if request.request_id not in self._off]
            unwanted = [request for request in requests if request.request_id in self._off]
        if unwanted:
            yield [response for request in unwanted for response in unstarted(request, version)]
        if wanted:
            yield from in_flushes(self._watched(engine, wanted), self._last_called_off)

    def _watched(self, engine: RolloutEngine, requests: list[Request]) -> Iterator[Response]:
        stream: Any = engine.generate(requests)
        with self._lock:
            # An engine forgets what was called off before it began: it is told from here on.
            self._engine, self._open = engine, Counter({r.request_id: r.n for r in requests})
            self._pass_on()
        try:
            for response in stream:
                with self._lock:
                    self._open[response.request_id] -= 1
                    # Once more: an engine that was just answering an abort may have missed another.
                    self._pass_on()
                yield response
        finally:
            with self._lock:
                self._engine = None
            if hasattr(stream, "close"):
                stream.close()

    def _last_called_off(self, response: Response) -> bool:
        """Whether this is the last of what was called off: somebody waits for it to go on elsewhere."""
        if response.finish_reason != "abort":
            return False
        with self._lock:
            return not any(left > 0 and name in self._off for name, left in self._open.items())

    def _reach(self, number: int) -> None:
        if number > self._number:
            self._number, self._off = number, CalledOff()

    def _pass_on(self) -> bool:
        if self._engine is None or not self._off:
            return True
        named = self._off.among([name for name, left in self._open.items() if left > 0])
        if named is None or named:
            try:
                self._engine.abort(named)
            except NotImplementedError:
                return False
        return True


def in_flushes(
    responses: Iterator[Response], urgent: Callable[[Response], bool] = lambda response: False
) -> Iterator[list[Response]]:
    """Responses in lists of those that came close together; what is `urgent` waits for nothing."""
    finished: list[Response] = []
    sent = -math.inf
    for response in responses:
        finished.append(response)
        if time.monotonic() - sent > FLUSH_S or urgent(response):
            yield finished
            finished, sent = [], time.monotonic()
    yield finished
