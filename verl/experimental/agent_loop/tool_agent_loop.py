"""The agent loop with tools under verl's import path. Its home is `verl.agents.agent_loop`."""

from __future__ import annotations

from verl.agents.agent_loop import ToolAgentLoop
from verl.missing_names import explain

__all__ = ["ToolAgentLoop"]

__getattr__ = explain(__name__)
