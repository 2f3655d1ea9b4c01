"""The agent loop of one turn under verl's import path. Its home is `verl.agents.agent_loop`."""

from __future__ import annotations

from verl.agents.agent_loop import SingleTurnAgentLoop

__all__ = ["SingleTurnAgentLoop"]
