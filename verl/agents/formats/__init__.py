"""How models write tool calls: the text of a turn becomes calls, or a reason for the model why one cannot be read.

A call inside a thinking block is thought about, not made.
"""

from verl.agents.formats import json_calls, marked_calls  # registers them
from verl.agents.formats.base import (
    ToolFormat,
    add_parser_name,
    detect_format,
    get_format,
    known_formats,
    parser_names,
    register_tool_format,
)

__all__ = [
    "ToolFormat",
    "add_parser_name",
    "detect_format",
    "get_format",
    "json_calls",
    "known_formats",
    "marked_calls",
    "parser_names",
    "register_tool_format",
]
