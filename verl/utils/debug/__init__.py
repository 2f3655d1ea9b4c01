"""The older name of `verl.utils.profiler`."""

from __future__ import annotations

from verl.utils.profiler import marked_timer, simple_timer

__all__ = ["marked_timer", "simple_timer"]
