"""Agent loops under verl's import path. Their home is `verl.agents.agent_loop`."""

from __future__ import annotations

from verl.agents.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    register,
)

__all__ = ["AgentLoopBase", "AgentLoopOutput", "SingleTurnAgentLoop", "ToolAgentLoop", "register"]
