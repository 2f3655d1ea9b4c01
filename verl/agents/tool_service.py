"""What the processes of tools, environments and users run: they import what was named, and answer requests."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from verl.agents.agent_code import load_agent
from verl.agents.base import ToolFailed, TryAgain
from verl.agents.builtin_tools import BuiltinTools, load_builtin
from verl.agents.hosted import Hosted, HostedFactory
from verl.agents.tools import load_environment, load_tools, load_user
from verl.user_code import error_line
from verl.user_process import Service

MAX_RESULT = 1 << 20
"""Characters of a result that are kept, half of them from its end."""
_MAX_ERROR = 1000


@dataclass(frozen=True)
class Target:
    """What to import."""

    kind: Literal["builtin", "tools", "environment", "user", "agent", "command"]
    spec: str
    builtin: BuiltinTools | None = None


def serve_targets(targets: Sequence[Target]) -> Service:
    """Import every target. The description is of each factory the number of its target and its HostedInfo; requests are
    (number of the factory, method of `Hosted`, its arguments, a seed or None), and ("close") ends the process."""
    loaded: list[tuple[int, HostedFactory]] = []
    for number, target in enumerate(targets):
        if target.kind == "environment":
            loaded += [(number, factory) for factory in load_environment(target.spec)]
        elif target.kind in ("agent", "command"):
            loaded.append((number, load_agent(target.spec, command=target.kind == "command")))
        elif target.builtin is not None:
            loaded.append((number, load_builtin(target.builtin)))
        else:
            loaded.append((number, (load_user if target.kind == "user" else load_tools)(target.spec)))
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        sys.stderr.write(
            f"Importing the tools started threads ({names}); forked processes do not have them. Start them in a call.\n"
        )
    importlib.import_module("jsonschema")  # or every process would, in its first call
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
    hosted: dict[int, Hosted] = {}  # every forked process fills its own

    async def answer(
        number: int, method: str, arguments: tuple[Any, ...], seed: int | None
    ) -> dict[str, Any]:
        if method == "close":
            if number in hosted:
                await hosted[number].close()
            raise SystemExit(0)
        if seed is not None:
            _seed(seed)
        try:
            if number not in hosted:
                hosted[number] = loaded[number][1].create()
            return {"result": _cut(await getattr(hosted[number], method)(*arguments))}
        except (Exception, asyncio.CancelledError) as error:  # sys.exit ends the process
            kind = error.kind if isinstance(error, ToolFailed) else ""
            full = error.full if isinstance(error, TryAgain) else None
            return {"error": _describe(error), "kind": kind, "where": error_line(error), "full": full}

    return Service(answer, [[number, asdict(factory.info)] for number, factory in loaded])


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed & 0xFFFFFFFF)


def _describe(error: BaseException) -> str:
    try:
        text = error.text if isinstance(error, ToolFailed) else f"{type(error).__name__}: {error}"
    except Exception:  # a user's __str__ may raise anything
        text = type(error).__name__
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " ..."


def _cut(value: Any) -> Any:
    if isinstance(value, tuple):  # of a call, with its reward
        return [_cut(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_RESULT:
        half = MAX_RESULT // 2
        return f"{value[:half]}\n[{len(value) - MAX_RESULT} characters left out]\n{value[-half:]}"
    return value
