"""A program to be run, how it ended, and the harness for calling one function of it.

Expected results never enter a sandbox: a program gets inputs, and its output is compared outside.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Literal

End = Literal["ok", "error", "timeout", "memory", "output", "processes", "sandbox"]


@dataclass(frozen=True)
class Program:
    """Python source and what it reads from standard input."""

    source: str
    stdin: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `sandbox` means that it was not run: the fault is ours or the service's."""

    end: End
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


_HARNESS = """
import io as _io, json as _json, os as _os, sys as _sys
_job = _json.loads(_sys.stdin.read())
_out = _os.fdopen(_os.dup(1), "w", buffering=1)
_os.dup2(_os.open(_os.devnull, _os.O_WRONLY), 1)
_sys.stdin = _io.StringIO("")
def _say(_number, _kind, _value):
    _out.write(_job["mark"] + _json.dumps([_number, _kind, _value]) + "\\n")
def _plain(_value):
    if isinstance(_value, (list, tuple)):
        return [_plain(_item) for _item in _value]
    if isinstance(_value, (set, frozenset)):
        return {"__set__": sorted((_plain(_item) for _item in _value), key=repr)}
    if isinstance(_value, dict):
        return {str(_key): _plain(_item) for _key, _item in _value.items()}
    if _value is None or isinstance(_value, (bool, int, float, str)):
        return _value
    return repr(_value)[:1000]
def _revive(_value):
    if isinstance(_value, list):
        return [_revive(_item) for _item in _value]
    if isinstance(_value, dict) and set(_value) == {"__python__"}:
        import ast as _ast
        return _ast.literal_eval(_value["__python__"]) if _value["__python__"] != "set()" else set()
    return _value
def _main():
    _space = {"__name__": "solution", "__builtins__": __builtins__}
    try:
        exec(compile(_job["source"], "solution.py", "exec"), _space)
        _name = _job["entry"]
        if _name not in _space and isinstance(_space.get("Solution"), type):
            _function = getattr(_space["Solution"](), _name)
        else:
            _function = _space[_name]
    except BaseException as _error:
        return _say(-1, "error", type(_error).__name__ + ": " + str(_error)[:500])
    for _number, (_args, _kwargs) in enumerate(_job["calls"]):
        try:
            _named = {_key: _revive(_item) for _key, _item in _kwargs.items()}
            _say(_number, "value", _plain(_function(*_revive(_args), **_named)))
        except BaseException as _error:
            _say(_number, "error", type(_error).__name__ + ": " + str(_error)[:500])
_main()
_out.flush()
_os._exit(0)
"""


class FunctionCalls:
    """A program that calls `entry` of `source` once for each list of arguments."""

    def __init__(self, source: str, entry: str, calls: list[tuple[list[Any], dict[str, Any]]]) -> None:
        self._mark = secrets.token_hex(8) + " "
        job = {"source": source, "entry": entry, "calls": calls, "mark": self._mark}
        self.count = len(calls)
        self.program = Program(_HARNESS, json.dumps(job))

    def results(self, outcome: Outcome) -> dict[int, Any]:
        """The value returned by each call that returned one."""
        values: dict[int, Any] = {}
        for line in outcome.stdout.splitlines():
            if not line.startswith(self._mark):
                continue
            try:
                number, kind, value = json.loads(line[len(self._mark) :])
            except (ValueError, TypeError, RecursionError):
                continue
            if kind == "value" and isinstance(number, int) and 0 <= number < self.count:
                values[number] = value
        return values
