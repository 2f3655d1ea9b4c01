"""What a rank is doing right now, seen from beside it: the call it serves, where its code stands, when it moved last.

What always holds: looking changes nothing and waits for nobody, so it works while the rank hangs. A sign of life
is a stack that moved: a rank deep in work moves within seconds, one that waits for another does not. While it waits for
processes of its own (`verl.observe.life`), their signs count as its own.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from verl.observe import life

SAMPLE_S = 0.25
_COLLECTIVE = (
    "torch/distributed/",
    "torch/_C/_distributed",
    "verl/engines/ranks.py",
    "verl/distributed.py",
    "verl/rollout/weight_sync/broadcast.py",
)
_SHOWN_FRAMES = 12


@dataclass(frozen=True)
class Sign:
    """One look at a rank. Ages are in seconds."""

    rank: int
    host: str
    pid: int
    call: str
    call_s: float
    still_s: float
    waits_for_others: bool
    where: str
    stack: str
    role: str = "rank"

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank} on {self.host} (process {self.pid})"


class StackWatchdog:
    """Watches the thread that serves calls."""

    def __init__(self, rank: int, role: str = "rank") -> None:
        self.rank, self.role = rank, role
        self.host = socket.gethostname()
        self._thread: int | None = None
        self._call = ""
        self._since = self._moved = time.monotonic()
        self._last: tuple[object, ...] = ()
        threading.Thread(target=self._watch, name="verl-pulse", daemon=True).start()

    @contextmanager
    def serving(self, call: str) -> Iterator[None]:
        """Around the body of a call, in the thread that runs it."""
        self._since = self._moved = time.monotonic()
        self._thread, self._call = threading.get_ident(), call
        try:
            yield
        finally:
            self._thread, self._call = None, ""

    def _watch(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            self._look(self._frame())

    def _look(self, frame: FrameType | None) -> None:
        seen = (life.beats(), *((id(f.f_code), f.f_lasti) for f in _outwards(frame)))
        if seen != self._last:
            self._last, self._moved = seen, time.monotonic()

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread) if self._thread is not None else None

    def sign(self) -> Sign:
        frame = self._frame()
        self._look(frame)
        now = time.monotonic()
        frames = list(_outwards(frame))
        lines = traceback.format_stack(frame)[-_SHOWN_FRAMES:] if frame is not None else []
        return Sign(
            rank=self.rank,
            host=self.host,
            pid=os.getpid(),
            call=self._call,
            call_s=now - self._since,
            still_s=now - self._moved,
            waits_for_others=any(part in f.f_code.co_filename for f in frames for part in _COLLECTIVE),
            where=_place(frames[0]) if frames else "between calls",
            stack="".join(lines),
            role=self.role,
        )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    parts = frame.f_code.co_filename.split(os.sep)
    return f"{'/'.join(parts[-3:])}:{frame.f_lineno} ({frame.f_code.co_name})"
