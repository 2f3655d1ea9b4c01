"""Live numbers of rank processes, asked for by threads that show them.

A rank that does not answer in time keeps its last numbers and is not asked again before it has; the run never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from verl.observe.live import Snapshot, live
from verl.workers.ray_calls import RankCalls
from verl.workers.rpc_server import RPCServer

WAIT_S = 1.0
"""How long a reader waits for ranks."""
FRESH_S = 0.5
"""Numbers this old are not asked for again."""


class RankSnapshots:
    """The newest snapshot of each rank."""

    def __init__(self, roles: Sequence[RankCalls]) -> None:
        self._calls = RankCalls.together(*roles)
        self._newest: dict[int, Snapshot] = {}
        self._asked: dict[Any, int] = {}
        self._asked_at = 0.0
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> list[Snapshot]:
        with self._lock:
            # After the end Ray may be shut down, and a call would start it again.
            if not self._closed and time.monotonic() - self._asked_at > FRESH_S:
                try:
                    self._ask()
                except Exception:  # of a rank or of Ray: the run's own calls report it
                    self._asked = {}
                self._asked_at = time.monotonic()
            return [self._newest[rank] for rank in sorted(self._newest)]

    def _ask(self) -> None:
        waiting = set(self._asked.values())
        for rank in range(len(self._calls)):
            if rank not in waiting:
                self._asked[self._calls.control(rank, RPCServer.control_live)] = rank
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=WAIT_S)
        for ref in answered:
            self._newest[self._asked.pop(ref)] = ray.get(ref)

    def close(self) -> None:
        """Nothing is asked after this; waits for a reader that is asking. No handle is left: the actors of the next Ray
        session of this process may have the same ids, and dropping a handle then would end them."""
        live.others = list
        with self._lock:
            self._closed = True
            self._calls.actors, self._asked = [], {}
