"""Who is still alive: every rank writes a sign of life into the process group's store; whoever sees a broken
connection reads them all twice and names those that stand still.

What always holds: a rank that stops because of another leaves a note first, so that those who then see *it* go
do not take it for the cause. Asking around takes at most `PATIENCE_S` seconds.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from typing import Any

import torch.distributed as dist

BEAT_S = 0.5
PATIENCE_S = 6.0
CLOSE_S = 5.0
_PREFIX = "verl/heartbeat"


class Heartbeat:
    """One per process, whatever the number of engines."""

    _current: Heartbeat | None = None

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.store.set(f"{_PREFIX}/who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="verl-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def start(cls) -> Heartbeat:
        """The heartbeat of the default process group; started at the first call."""
        store = dist.distributed_c10d._get_default_store()
        if cls._current is None or cls._current.store is not store:
            if cls._current is not None:
                cls._current.close()
            cls._current = cls(store, dist.get_rank(), dist.get_world_size())
        return cls._current

    def close(self) -> None:
        """No more beats. A thread that is inside the store when Python ends would take the whole process down."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        atexit.unregister(self.close)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self.store.set(f"{_PREFIX}/beat/{self.rank}", str(count))
            except (RuntimeError, OSError):
                return  # the store is gone, and with it the process group

    def _beats(self) -> dict[int, bytes]:
        found = {}
        for rank in range(self.world_size):
            key = f"{_PREFIX}/beat/{rank}"
            found[rank] = self.store.get(key) if self.store.check([key]) else b""
        return found

    def _left_note(self, rank: int) -> bool:
        return bool(self.store.check([f"{_PREFIX}/note/{rank}"]))

    def missing(self) -> list[int]:
        """Ranks that stand still and did not say that they stop because of another. Leaves this rank's note."""
        self.store.set(f"{_PREFIX}/note/{self.rank}", "1")
        first = self._beats()
        still = [rank for rank in first if rank != self.rank]
        deadline = time.monotonic() + PATIENCE_S
        while still and time.monotonic() < deadline:
            time.sleep(BEAT_S)
            now = self._beats()
            still = [rank for rank in still if now[rank] == first[rank]]
        return [rank for rank in still if not self._left_note(rank)]

    def describe(self, rank: int) -> str:
        try:
            return f"rank {rank} ({self.store.get(f'{_PREFIX}/who/{rank}').decode()})"
        except (RuntimeError, OSError):
            return f"rank {rank}"
