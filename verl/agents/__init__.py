"""Conversations of several turns: tools, environments, simulated users; finished responses become further requests.

Public names are fetched when first used: a file of tools that imports them loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "Environment": "verl.agents.tools",
    "ToolFailed": "verl.agents.base",
    "ToolFormat": "verl.agents.formats",
    "register_tool_format": "verl.agents.formats",
    "tool": "verl.agents.tools",
}

__all__ = ["Environment", "ToolFailed", "ToolFormat", "register_tool_format", "tool"]

if TYPE_CHECKING:
    from verl.agents.base import ToolFailed
    from verl.agents.formats import ToolFormat, register_tool_format
    from verl.agents.tools import Environment, tool


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verl.agents' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
