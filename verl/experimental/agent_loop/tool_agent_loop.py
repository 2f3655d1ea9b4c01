"""The agent loop with tools under verl's import path. Its home is `verl.agents.agent_loop`."""

from __future__ import annotations

from verl.agents.agent_loop import ToolAgentLoop

__all__ = ["ToolAgentLoop"]
