"""Requests over several engines: which engine runs what, which wait, which were cancelled.

An engine is given as many samples as it runs at once and a few more; the rest waits here, so that whichever engine is
free first takes it. Every sample is returned to the caller exactly once; a cancelled request is never dispatched.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from verl.errors import RolloutError
from verl.rollout.base import Request, Response


def aborted(request: Request, version: int) -> list[Response]:
    """The answer to a request that was cancelled before it started."""
    return [Response(request.request_id, sample, [], [], "abort", version) for sample in range(request.n)]


@dataclass
class _Engine:
    """What one engine has to answer."""

    missing: Counter[str] = field(default_factory=Counter)
    """Samples by request."""

    @property
    def load(self) -> int:
        return self.missing.total()


class RequestScheduler:
    """Safe to use from several threads."""

    def __init__(self, ranks: Iterable[int], max_num_seqs: int) -> None:
        self._engines = {rank: _Engine() for rank in ranks}
        # A quarter more than it runs: the engine refills its batch while the next chunk is on its way.
        self._limit = max_num_seqs + max(1, max_num_seqs // 4)
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._ids: set[str] = set()
        self._prefix_rank: dict[str, int] = {}
        self._numbers = itertools.count()

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            repeated = [name for name, times in Counter(r.request_id for r in requests).items() if times > 1]
            repeated += [request.request_id for request in requests if request.request_id in self._ids]
            if repeated:
                raise RolloutError(f"request {repeated[0]!r} was submitted twice; request ids must differ")
            self._ids.update(request.request_id for request in requests)
            self._waiting.extend(requests)

    def dispatch(self) -> dict[int, tuple[int, list[Request]]]:
        """What to send to each engine now, with the number of the dispatch; least loaded first."""
        with self._lock:
            chosen: dict[int, list[Request]] = {}
            later: deque[Request] = deque()
            while self._waiting:
                request = self._waiting.popleft()
                # A conversation continues on the rank that has its KV blocks.
                fixed = self._prefix_rank.get(request.prefix_id) if request.prefix_id is not None else None
                rank = min(self._engines, key=lambda r: self._engines[r].load) if fixed is None else fixed
                engine = self._engines[rank]
                if engine.load and engine.load + request.n > self._limit:
                    later.append(request)
                    if fixed is None:
                        break
                    continue
                if request.prefix_id is not None:
                    self._prefix_rank[request.prefix_id] = rank
                engine.missing[request.request_id] += request.n
                chosen.setdefault(rank, []).append(request)
            self._waiting.extendleft(reversed(later))
            return {rank: (next(self._numbers), requests) for rank, requests in chosen.items()}

    def returned(self, rank: int, requests: Sequence[Request]) -> None:
        """An engine did not take what was sent to it."""
        with self._lock:
            for request in requests:
                del self._engines[rank].missing[request.request_id]
            self._waiting.extendleft(reversed(requests))

    def answered(self, rank: int, responses: Sequence[Response]) -> None:
        with self._lock:
            missing = self._engines[rank].missing
            for response in responses:
                missing[response.request_id] -= 1
                if missing[response.request_id] == 0:
                    del missing[response.request_id]
                    self._ids.discard(response.request_id)

    def cancel(self, request_ids: Collection[str] | None) -> dict[int, list[str]]:
        """Cancel requests (None: all). Returns those that engines run, by rank; the rest come out of
        `take_cancelled`."""
        with self._lock:
            wanted = None if request_ids is None else set(request_ids)
            self._cancelled += [r for r in self._waiting if wanted is None or r.request_id in wanted]
            self._waiting = deque(
                r for r in self._waiting if wanted is not None and r.request_id not in wanted
            )
            found = {
                rank: [name for name in engine.missing if wanted is None or name in wanted]
                for rank, engine in self._engines.items()
            }
            return {rank: names for rank, names in found.items() if names}

    def take_cancelled(self, version: int) -> list[Response]:
        """Answers to requests that were cancelled before an engine had them."""
        with self._lock:
            requests, self._cancelled = self._cancelled, []
            self._ids.difference_update(request.request_id for request in requests)
            return [response for request in requests for response in aborted(request, version)]

    def last_number(self) -> int:
        """Later dispatches have a larger number."""
        with self._lock:
            return next(self._numbers)

    def release(self, prefix_ids: Collection[str]) -> dict[int, list[str]]:
        """Forget conversations; by the rank that has their KV blocks."""
        with self._lock:
            found: dict[int, list[str]] = {}
            for name in prefix_ids:
                if name in self._prefix_rank:
                    found.setdefault(self._prefix_rank.pop(name), []).append(name)
            return found

    def forget_prefixes(self) -> None:
        """New weights: no KV block is valid."""
        with self._lock:
            self._prefix_rank.clear()

    def clear(self) -> None:
        """Drop everything, after an error."""
        with self._lock:
            self._waiting.clear()
            self._cancelled, self._ids = [], set()
            for engine in self._engines.values():
                engine.missing.clear()

    def loads(self) -> dict[int, int]:
        """Samples each engine has to answer."""
        with self._lock:
            return {rank: engine.load for rank, engine in self._engines.items()}

    def waiting(self) -> int:
        """Samples that no engine has, cancelled ones included."""
        with self._lock:
            return sum(request.n for request in (*self._waiting, *self._cancelled))
