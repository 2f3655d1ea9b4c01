"""The result of a probe: a status, what was seen, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "fatal"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    status: Status
    seen: str
    fix: str = ""
    """A key, a command or a variable to set."""
    group: str = ""
    """Findings of one group share a line of the text report."""
    data: dict[str, Any] = field(default_factory=dict)


def size(count: float) -> str:
    """Bytes for people."""
    for unit, width in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= width:
            return f"{count / width:.{0 if count >= 100 * width else 1}f} {unit}"
    return f"{count:.0f} bytes"


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The class and first line of an error, at most `limit` characters."""
    if isinstance(error, BaseException):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        error = f"{type(error).__name__}: {first}" if first else type(error).__name__
    text = " ".join(error.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
