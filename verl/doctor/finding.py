"""What a probe says: what was seen, what it means, what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "fatal"]
ORDER: tuple[Status, ...] = ("ok", "note", "warning", "fatal")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    status: Status
    seen: str
    means: str = ""
    do: str = ""
    """A key, a command or a variable to set."""
    together: str = ""
    """Findings with the same word here share a line while they are in order."""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        return cls(**values)

    def at_least(self, status: Status) -> Finding:
        """The same, taken at least as seriously."""
        return replace(self, status=status) if ORDER.index(self.status) < ORDER.index(status) else self


def size(count: float) -> str:
    """Bytes in words."""
    for unit, width in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= width:
            return f"{count / width:.{0 if count >= 100 * width else 1}f} {unit}"
    return f"{count:.0f} bytes"


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """The gist of an error: its kind and first line."""
    if isinstance(error, BaseException):
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        error = f"{type(error).__name__}: {first}" if first else type(error).__name__
    text = " ".join(error.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
