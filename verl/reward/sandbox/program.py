"""A program to be run in a sandbox, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

End = Literal["ok", "error", "timeout", "memory", "output", "processes", "sandbox"]


@dataclass(frozen=True)
class Program:
    """Python source and what it reads from standard input."""

    source: str
    stdin: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `sandbox` means that it was not run: the fault is ours or the service's."""

    end: End
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
