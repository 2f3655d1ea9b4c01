"""Timers under verl's import path."""

from __future__ import annotations

from verl.utils.profiler.performance import marked_timer, simple_timer

__all__ = ["marked_timer", "simple_timer"]
