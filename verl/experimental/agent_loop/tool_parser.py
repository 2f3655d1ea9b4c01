"""Readers of tool calls under verl's import path. Their home is `verl.agents.agent_loop`."""

from __future__ import annotations

from verl.agents.agent_loop import FunctionCall, ToolParser

__all__ = ["FunctionCall", "ToolParser"]
