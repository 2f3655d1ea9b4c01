"""A program that serves a few good and bad tools by MCP: over standard input and output, or at a port.

Usage: mcp_server.py [--port N] [--after FILE: start once it exists] [--fail TEXT: exit with it] [--empty]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

try:
    from mcp.server.mcpserver import MCPServer as Server

    OLD = False
except ImportError:  # before 2.0
    from mcp.server.fastmcp import FastMCP as Server  # type: ignore[no-redef]

    OLD = True


async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


async def pid() -> str:
    """The server's process."""
    return str(os.getpid())


async def table() -> dict[str, Any]:
    """A structured result."""
    return {"rows": [1, 2]}


async def environment(variable: str) -> str:
    """A variable of the environment."""
    return os.environ.get(variable, "unset")


async def fail() -> str:
    """Raise an exception."""
    raise ValueError("there is no such page")


async def hang() -> str:
    """Wait for ever."""
    await asyncio.sleep(3600)
    return ""


async def block() -> str:
    """Wait for ever, and let nothing else run."""
    time.sleep(3600)
    return ""


async def die() -> str:
    """End the process."""
    os._exit(3)


async def garbage() -> str:
    """Write to the standard output what is no message."""
    os.write(1, b'this is not JSON\n{"jsonrpc": 7}\n\xff\n')
    return "after the garbage"


async def flood() -> str:
    """A very long result."""
    return "x" * 3_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--fail")
    parser.add_argument("--empty", action="store_true")
    args = parser.parse_args()
    if args.fail:
        sys.exit(args.fail)
    while args.after and not args.after.exists():
        time.sleep(0.05)
    address: dict[str, Any] = {"host": "127.0.0.1", "port": args.port} if args.port else {}
    server = Server("tests", **address) if OLD else Server("tests")
    for function in (
        () if args.empty else (add, pid, table, environment, fail, hang, block, die, garbage, flood)
    ):
        server.tool()(function)
    if not args.port:
        server.run()
    elif OLD:
        server.run("streamable-http")
    else:
        server.run("streamable-http", **address)


if __name__ == "__main__":
    main()
