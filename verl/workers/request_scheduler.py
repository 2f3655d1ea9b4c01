"""Which of several engines runs which request.

An engine is given as many samples as it runs at once and a few more; the rest waits here, so that whichever engine is
free first takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from verl.rollout.base import Request


class RequestScheduler:
    """Not for several threads at once: the caller holds a lock where it has them."""

    def __init__(self, ranks: Iterable[int], max_num_seqs: int) -> None:
        self.loads = dict.fromkeys(ranks, 0)
        """Samples each engine has to answer."""
        # A quarter more than it runs: the engine refills its batch while the next chunk is on its way.
        self._limit = max_num_seqs + max(1, max_num_seqs // 4)
        self._waiting: deque[Request] = deque()
        self._prefix_rank: dict[str, int] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def dispatch(self) -> dict[int, list[Request]]:
        """What to send to each engine now; least loaded first."""
        chosen: dict[int, list[Request]] = {}
        later: deque[Request] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            # A conversation continues on the rank that has its KV blocks.
            fixed = self._prefix_rank.get(request.prefix_id) if request.prefix_id is not None else None
            rank = min(self.loads, key=lambda r: self.loads[r]) if fixed is None else fixed
            if self.loads[rank] and self.loads[rank] + request.n > self._limit:
                later.append(request)
                if fixed is None:
                    break
                continue
            if request.prefix_id is not None:
                self._prefix_rank[request.prefix_id] = rank
            self.loads[rank] += request.n
            chosen.setdefault(rank, []).append(request)
        self._waiting.extendleft(reversed(later))
        return chosen

    def answered(self, rank: int, samples: int) -> None:
        self.loads[rank] -= samples

    def cancel(self, request_ids: Collection[str] | None) -> list[Request]:
        """Drop requests that wait (None: all), and return them."""
        waiting, self._waiting = self._waiting, deque()
        dropped: list[Request] = []
        for request in waiting:
            named = request_ids is None or request.request_id in request_ids
            if named:
                dropped.append(request)
            else:
                self._waiting.append(request)
        return dropped

    def release(self, prefix_ids: Collection[str]) -> dict[int, list[str]]:
        """Forget conversations; by the rank that has their KV blocks."""
        released: dict[int, list[str]] = {}
        for name in prefix_ids:
            if name in self._prefix_rank:
                released.setdefault(self._prefix_rank.pop(name), []).append(name)
        return released

    def forget_prefixes(self) -> None:
        """New weights: no KV block is valid."""
        self._prefix_rank.clear()

    def clear(self) -> None:
        """Drop everything, after an error."""
        self._waiting.clear()
        self.loads = dict.fromkeys(self.loads, 0)

    @property
    def waiting(self) -> int:
        """Samples that no engine has."""
        return sum(request.n for request in self._waiting)

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(self.loads.values())
