"""Signs of life of what this process waits for, counted: a token of a server, an answer of an engine's processes.

A process that waits stands still itself; whoever watches it (`verl.workers.watchdog`) counts these as movement.
"""

from __future__ import annotations

_count = 0


def beat() -> None:
    """Something this process waits for has moved."""
    global _count
    _count += 1


def beats() -> int:
    """Changes with every sign of life."""
    return _count
