"""A process that serves calls by name, and what it does alike whatever its role: a rank of the trainer, a reward model.

Plain Python: nothing here knows how calls arrive.

What always holds: no exception leaves `serve`, it comes back as a `Failure` with its traceback; `sign` answers beside
the call that runs, also while that hangs.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from verl.workers.outcome import Failure, LogBuffer, Outcome
from verl.workers.watchdog import Sign, StackWatchdog


class RPCServer:
    """Serves `do_<call>`, one call at a time."""

    def __init__(self, rank: int, role: str = "rank") -> None:
        """`role` is what messages call it, before its number."""
        self.rank, self.role = rank, role
        self.pulse = StackWatchdog(rank, role)
        self._lines = LogBuffer(rank)
        root = logging.getLogger()
        root.addHandler(self._lines)
        root.setLevel(logging.INFO)
        self._address = "127.0.0.1"

    def serve(self, call: str, *args: Any, **kwargs: Any) -> Outcome:
        value, failure = None, None
        with self.pulse.serving(call):
            try:
                value = getattr(self, f"do_{call}")(*args, **kwargs)
            except (
                Exception,
                SystemExit,
            ) as error:  # an exit would end this process, or its thread, silently
                failure = self._failure(call, error)
        return Outcome(value, failure, self._lines.take())

    def stream(self, call: str, *args: Any) -> Iterator[Outcome]:
        """Like `serve`, for a call that answers in pieces."""
        with self.pulse.serving(call):
            try:
                for value in getattr(self, f"do_{call}")(*args):
                    yield Outcome(value, None, self._lines.take())
            except (Exception, SystemExit) as error:
                yield Outcome(None, self._failure(call, error), self._lines.take())

    def sign(self) -> Sign:
        return self.pulse.sign()

    def _failure(self, call: str, error: BaseException) -> Failure:
        return Failure.of(
            error, rank=self.rank, host=self.pulse.host, pid=os.getpid(), call=call, role=self.role
        )

    def do_who(self, address: str = "127.0.0.1", log: str = "") -> dict[str, Any]:
        self._address = address
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": address,
            "log": log,
            "devices": devices,
        }
