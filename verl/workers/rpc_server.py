"""Serves calls by name in one process, and carries values, failures and log records back to the driver.

No exception leaves `serve` or `stream`: it is sent as text, with the rank and host it belongs to.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl import errors
from verl.errors import TrainingHalted, VerlError
from verl.observe.live import Snapshot, live
from verl.watchdog import RankStatus, StackWatchdog

# How the heartbeat reports that a connection to another rank broke (`verl.watchdog`).
_OF_ANOTHER_RANK = ("died or stopped answering", "communication failed although")
# How torch.distributed reports it outside of an engine (while saving, while resuming).
_BROKEN = re.compile(r"connection (closed|reset|refused)|broken pipe|remote worker crashing", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """An exception on a rank."""

    rank: int
    host: str
    pid: int
    call: str
    kind: str
    message: str
    traceback: str
    role: str = "rank"

    @classmethod
    def of(cls, error: BaseException, watchdog: StackWatchdog) -> Failure:
        text = "".join(traceback.format_exception(error))
        kind, message = type(error).__name__, str(error)
        return cls(
            watchdog.rank, watchdog.host, os.getpid(), watchdog.call, kind, message, text, watchdog.role
        )

    @property
    def caused_by_another(self) -> bool:
        """A rank that stops because its connection to another broke."""
        if self.kind == TrainingHalted.__name__:
            return any(text in self.message for text in _OF_ANOTHER_RANK)
        return "torch/distributed/" in self.traceback and _BROKEN.search(self.message) is not None

    def as_error(self) -> VerlError:
        """To raise on the driver: the same class for what a user can correct, with the rank first."""
        where = f"{self.role} {self.rank} on {self.host} (process {self.pid}), in {self.call}"
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, VerlError):
            return known(f"{where}: {self.message}")
        if self.caused_by_another:
            return TrainingHalted(
                f"{where}: the connection to another rank broke: most likely that rank died; look at its log for the "
                "reason, then resume from the last checkpoint (trainer.resume_mode=auto). "
                f"First error: {self.message.strip().splitlines()[0][:200]}"
            )
        return TrainingHalted(f"{where}: {self.kind}: {self.message}\n\n{self.traceback}")


@dataclass(frozen=True)
class LogRecord:
    """One log message, repeated by the driver."""

    logger: str
    level: int
    text: str


@dataclass
class Outcome:
    """The answer to a call."""

    value: Any = None
    failure: Failure | None = None
    logs: list[LogRecord] = field(default_factory=list)


class LogBuffer(logging.Handler):
    """Keeps what a rank logs until its next answer: everything from rank 0, warnings from the others."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._records: list[LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(LogRecord(record.name, record.levelno, record.getMessage()))

    def take(self) -> list[LogRecord]:
        self.acquire()
        try:
            taken, self._records = self._records, []
        finally:
            self.release()
        return taken


class RPCServer:
    """Serves its methods `do_<call>` one at a time, and `control_<call>` concurrently from another thread. The driver
    names them by reference (`RankCalls.all(TrainRank.do_save, ...)`).

    Independent of how calls arrive (Ray, or a test that starts processes itself)."""

    role = "rank"
    """What messages call this process, before its number."""

    def __init__(self, rank: int, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.watchdog = StackWatchdog(rank, self.role)
        self.address = "127.0.0.1"
        live.process = f"{self.role} {rank}".replace(" ", "_")
        self._logs = LogBuffer(rank)
        root = logging.getLogger()
        root.addHandler(self._logs)
        root.setLevel(logging.INFO)

    def method(self, call: str) -> Callable[..., Any]:
        """What serves a call."""
        method: Callable[..., Any] = getattr(self, f"do_{call}")
        return method

    def serve(self, call: str, *args: Any, label: str = "") -> Outcome:
        """The answer of `do_<call>`. `label`: what messages and phases call it."""
        value, failure, label = None, None, label or call
        try:
            with self.watchdog.serving(label), live.phase(label):
                value = self.method(call)(*args)
        # SystemExit would end this process, or its thread, without a message.
        except (Exception, SystemExit) as error:
            failure = Failure.of(error, self.watchdog)
        return Outcome(value, failure, self._logs.take())

    def stream(self, call: str, *args: Any) -> Iterator[Outcome]:
        """Like `serve`, for a call that yields several values."""
        try:
            with self.watchdog.serving(call), live.phase(call):
                for value in self.method(call)(*args):
                    yield Outcome(value, None, self._logs.take())
        except (Exception, SystemExit) as error:
            yield Outcome(None, Failure.of(error, self.watchdog), self._logs.take())

    def control_status(self) -> RankStatus:
        return self.watchdog.status()

    def control_live(self) -> Snapshot:
        return live.snapshot()

    def do_handshake(self, address: str = "127.0.0.1", log: str = "") -> dict[str, Any]:
        self.address = address
        return {
            "host": self.watchdog.host,
            "pid": os.getpid(),
            "address": address,
            "log": log,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }

    def do_close(self) -> None:
        """Free what was built."""
