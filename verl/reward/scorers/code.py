"""Programming: the response's code is run in the sandbox against tests.

The score is the share of tests passed, or all-or-nothing. A program that is wrong, hangs, crashes or breaks a
limit fails its test; only a sandbox that does not work leaves the sample without a score. Expected results never enter
the sandbox: a program gets inputs, and its output is compared outside.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from verl.errors import RewardError
from verl.json_input import parse_json
from verl.reward import sandbox
from verl.reward.sandbox import Outcome, Program
from verl.reward.scorers.code_tests import CallTest, StdinTest, call_passes, parse, same_output
from verl.reward.scorers.text import blocks

_FENCE, _END_FENCE = re.compile(r"```[ \t]*+([\w+-]*+)[ \t]*+\n"), re.compile("```")
_BUDGET = 0.8
"""Share of reward.timeout_s for all tests of one response: a slow program then fails its tests instead of leaving the
response without a score."""
# Calls a function of the solution; what the solution itself prints is dropped.
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


def compute_score(
    solution_str: str, ground_truth: Any, all_or_nothing: bool | None = None, max_tests: int | None = None
) -> dict[str, Any]:
    """`all_or_nothing` overrides reward.sandbox.all_or_nothing; `max_tests` runs only that many, the first ones."""
    strict = sandbox.configured().sandbox.all_or_nothing if all_or_nothing is None else all_or_nothing
    tests = parse(ground_truth)
    code = extract_code(solution_str)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "passed": 0.0, "code_end": "no code"}
    if tests.calls:
        verdicts, end = _calls(code, tests.entry or "", tests.calls[:max_tests])
    else:
        verdicts, end = _stdin(code, tests.stdin[:max_tests], strict)
    share = sum(verdicts) / max(len(verdicts), 1)
    right = bool(verdicts) and all(verdicts)
    return {"score": float(right) if strict else share, "acc": float(right), "passed": share, "code_end": end}


def extract_code(text: str) -> str | None:
    """The last fenced block that is Python or unnamed; a response without any fence is code as a whole."""
    found = [(opening.group(1), code) for opening, code in blocks(text, _FENCE, _END_FENCE)]
    named = [code for language, code in found if language.lower() in ("python", "py", "python3")]
    unnamed = [code for language, code in found if not language]
    chosen = named or unnamed
    if chosen:
        return chosen[-1]
    return text if not found and "```" not in text and text.strip() else None


def call_function(
    source: str, entry: str, calls: list[tuple[list[Any], dict[str, Any]]], timeout_s: float
) -> tuple[dict[int, Any], Outcome]:
    """Call the function `entry` of `source` once for each pair of arguments, in the sandbox: the values returned, by
    the number of the call, and how the program ended."""
    mark = secrets.token_hex(8) + " "
    job = {"source": source, "entry": entry, "calls": calls, "mark": mark}
    outcome = _run(Program(_HARNESS, json.dumps(job)), timeout_s)
    values: dict[int, Any] = {}
    for line in outcome.stdout.splitlines():
        if line.startswith(mark):
            try:
                number, kind, value = parse_json(line.removeprefix(mark))
            except (ValueError, TypeError):
                continue
            if kind == "value" and isinstance(number, int) and 0 <= number < len(calls):
                values[number] = value
    return values, outcome


def _calls(code: str, entry: str, tests: list[CallTest]) -> tuple[list[bool], str]:
    returned, outcome = call_function(code, entry, [(test.args, test.kwargs) for test in tests], _budget_s())
    passed = (n in returned and call_passes(test, returned[n]) for n, test in enumerate(tests))
    return list(passed), outcome.end


def _stdin(code: str, tests: list[StdinTest], strict: bool) -> tuple[list[bool], str]:
    deadline = time.monotonic() + _budget_s()

    def one(test: StdinTest) -> tuple[bool, str]:
        left = deadline - time.monotonic()
        if left <= 0:
            return False, "timeout"
        outcome = _run(Program(code, test.stdin), left)
        return outcome.end == "ok" and same_output(outcome.stdout, test.expected), outcome.end

    fusion = sandbox.configured().sandbox_fusion
    if fusion.url and len(tests) > 1:
        with ThreadPoolExecutor(min(len(tests), fusion.max_concurrent)) as threads:
            results = list(threads.map(one, tests))
    else:
        results = []
        for test in tests:
            results.append(one(test))
            if strict and not results[-1][0]:
                break  # nothing that follows can change the score
    verdicts = [passed for passed, _ in results] + [False] * (len(tests) - len(results))
    return verdicts, next((end for _, end in results if end != "ok"), "ok")


def _budget_s() -> float:
    return _BUDGET * sandbox.configured().timeout_s


def _run(program: Program, timeout_s: float) -> Outcome:
    limits = sandbox.configured().sandbox
    outcome = sandbox.run(program, replace(limits, timeout_s=min(limits.timeout_s, timeout_s)))
    if outcome.end == "sandbox":
        raise RewardError(
            f"The sandbox could not run a program: {outcome.stderr.strip()[-300:] or 'no reason given'}"
        )
    return outcome
