"""What agent loops are written with, under verl's import path. Its home is `verl.agents.agent_loop`."""

from __future__ import annotations

from verl.agents.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    register,
)
from verl.missing_names import explain

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "DictConfigWrap",
    "ToolListWrap",
    "register",
]

__getattr__ = explain(__name__)
