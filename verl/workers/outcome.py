"""What a call on a rank came to: a value or a failure, and the log lines it left.

What always holds: an exception never crosses processes as an object of an unknown class; its traceback crosses as
text, written where it happened, with the rank and the host that it belongs to.
"""

from __future__ import annotations

import logging
import re
import traceback
from dataclasses import dataclass, field
from typing import Any

from verl import errors
from verl.errors import TrainingHalted, VerlError

# How the engines say that a connection to another rank broke (`verl.engines.ranks`).
_OF_OTHERS = ("died or stopped answering", "communication failed although")
# How torch.distributed says it where no engine stands between (while saving, while resuming).
_BROKEN = re.compile(r"connection (closed|reset|refused)|broken pipe|remote worker crashing", re.IGNORECASE)


class WorkersLost(TrainingHalted):
    """Ranks died or hang: with `trainer.max_restarts` the run begins again from the last checkpoint."""


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
    def of(
        cls, error: BaseException, *, rank: int, host: str, pid: int, call: str, role: str = "rank"
    ) -> Failure:
        text = "".join(traceback.format_exception(error))
        return cls(rank, host, pid, call, type(error).__name__, str(error), text, role)

    @property
    def caused_by_another(self) -> bool:
        """A rank that stops because its connection to another broke."""
        if self.kind == TrainingHalted.__name__:
            return any(text in self.message for text in _OF_OTHERS)
        return "torch/distributed/" in self.traceback and _BROKEN.search(self.message) is not None

    def as_error(self) -> VerlError:
        """To raise on the controller: the same class for what a user can mend, with the place first."""
        where = f"{self.role} {self.rank} on {self.host} (process {self.pid}), in {self.call}"
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, VerlError):
            return known(f"{where}: {self.message}")
        if self.caused_by_another:
            return TrainingHalted(
                f"{where}: the connection to another rank broke: most likely that rank died; look at its log for the "
                "reason, then resume from the last checkpoint (trainer.resume_mode=auto). "
                f"First sign: {self.message.strip().splitlines()[0][:200]}"
            )
        return TrainingHalted(f"{where}: {self.kind}: {self.message}\n\n{self.traceback}")


@dataclass(frozen=True)
class Line:
    """One log record, to be said again on the controller."""

    logger: str
    level: int
    text: str


@dataclass
class Outcome:
    """Sent back for every call."""

    value: Any = None
    failure: Failure | None = None
    lines: list[Line] = field(default_factory=list)


class LogBuffer(logging.Handler):
    """Keeps what a rank logs until its next answer: everything from rank 0, warnings from the others."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self._lines: list[Line] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(Line(record.name, record.levelno, record.getMessage()))

    def take(self) -> list[Line]:
        taken, self._lines = self._lines, []
        return taken
