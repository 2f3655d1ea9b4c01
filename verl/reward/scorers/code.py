"""Programming: the response's code is run in the sandbox against tests.

The score is the share of tests passed, or all-or-nothing. A program that is wrong, hangs, crashes or breaks a
limit fails its test; only a sandbox that does not work leaves the sample without a score.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from verl.errors import RewardError
from verl.reward import sandbox
from verl.reward.sandbox.program import FunctionCalls, Outcome, Program
from verl.reward.scorers.code_tests import CallTest, StdinTest, call_passes, parse, same_output

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)


def compute_score(
    solution_str: str, ground_truth: Any, all_or_nothing: bool | None = None, max_tests: int | None = None
) -> dict[str, Any]:
    """`all_or_nothing` overrides reward.sandbox.all_or_nothing; `max_tests` runs only the first so many."""
    settings = sandbox.settings()
    strict = settings.all_or_nothing if all_or_nothing is None else all_or_nothing
    tests = parse(ground_truth)
    code = extract_code(solution_str)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "passed": 0.0, "code_end": "no code"}
    if tests.calls:
        verdicts, end = _calls(code, tests.entry or "", tests.calls[:max_tests], settings)
    else:
        verdicts, end = _stdin(code, tests.stdin[:max_tests], settings, strict)
    share = sum(verdicts) / max(len(verdicts), 1)
    right = bool(verdicts) and all(verdicts)
    return {"score": float(right) if strict else share, "acc": float(right), "passed": share, "code_end": end}


def extract_code(text: str) -> str | None:
    """The last fenced block that is Python or unnamed; a response without any fence is code as a whole."""
    blocks = _FENCE.findall(text)
    named = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    unnamed = [code for language, code in blocks if not language]
    chosen = named or unnamed
    if chosen:
        return chosen[-1]
    return text if not blocks and "```" not in text and text.strip() else None


def _stdin(
    code: str, tests: list[StdinTest], settings: sandbox.Settings, strict: bool
) -> tuple[list[bool], str]:
    deadline = time.monotonic() + settings.budget_s

    def one(test: StdinTest) -> tuple[bool, str]:
        left = deadline - time.monotonic()
        if left <= 0:
            return False, "timeout"
        limited = replace(settings, timeout_s=min(settings.timeout_s, left))
        outcome = _ran(sandbox.run(Program(code, test.stdin), limited))
        return outcome.end == "ok" and same_output(outcome.stdout, test.expected), outcome.end

    if settings.url and len(tests) > 1:
        with ThreadPoolExecutor(min(len(tests), settings.max_concurrent)) as threads:
            results = list(threads.map(one, tests))
    else:
        results = []
        for test in tests:
            results.append(one(test))
            if strict and not results[-1][0]:
                break  # nothing that follows can change the score
    verdicts = [passed for passed, _ in results] + [False] * (len(tests) - len(results))
    return verdicts, next((end for _, end in results if end != "ok"), "ok")


def _calls(
    code: str, entry: str, tests: list[CallTest], settings: sandbox.Settings
) -> tuple[list[bool], str]:
    calls = FunctionCalls(code, entry, [(test.args, test.kwargs) for test in tests])
    limited = replace(settings, timeout_s=min(settings.timeout_s, settings.budget_s))
    outcome = _ran(sandbox.run(calls.program, limited))
    returned = calls.results(outcome)
    verdicts = [
        number in returned and call_passes(test, returned[number]) for number, test in enumerate(tests)
    ]
    return verdicts, outcome.end


def _ran(outcome: Outcome) -> Outcome:
    if outcome.end == "sandbox":
        raise RewardError(
            f"The sandbox could not run a program: {outcome.stderr.strip()[-300:] or 'no reason given'}"
        )
    return outcome
