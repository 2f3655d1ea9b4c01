"""Tool calls: those in a response, between <tool_call> and </tool_call>, against those that are expected.

The truth is JSON text of a list of {"name", "arguments"}; an empty list expects an answer without a call.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from verl.errors import RewardError
from verl.json_input import parse_json

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_UNREADABLE = "unreadable"


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """`score`: the share of the calls that are right, of those expected or, where there are more, of those made. `acc`:
    1 when all are right. `names`: the same share for the names alone."""
    expected = Counter(_key(call) for call in _truth(ground_truth))
    made = Counter(_made(solution_str))
    score = _shared(expected, made)
    names = _shared(*(Counter(name for name, _ in calls.elements()) for calls in (expected, made)))
    return {"score": score, "acc": float(score == 1.0), "names": names, "pred": str(sorted(made.elements()))}


def _shared(expected: Counter[Any], made: Counter[Any]) -> float:
    """1 where both are empty."""
    total = max(expected.total(), made.total())
    return (expected & made).total() / total if total else 1.0


def _made(text: str) -> list[tuple[str, str]]:
    """The calls after the thinking. A call that cannot be read equals none that is expected."""
    calls = []
    for written in _CALL.findall(text.rpartition("</think>")[2]):
        try:
            calls.append(_key(parse_json(written)))
        except (ValueError, KeyError, TypeError, AttributeError):
            calls.append((_UNREADABLE, ""))
    return calls


def _key(call: dict[str, Any]) -> tuple[str, str]:
    """Name and arguments; the order of arguments does not matter, nor whether they are JSON or text of it."""
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    return str(call["name"]), json.dumps(arguments, sort_keys=True)


def _truth(ground_truth: Any) -> list[dict[str, Any]]:
    try:
        calls = parse_json(ground_truth) if isinstance(ground_truth, str) else list(ground_truth)
        for call in calls:
            _key(call)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RewardError(
            f"The scorer of tool calls cannot use the ground truth {str(ground_truth)[:80]!r}; it takes a list of "
            f'{{"name", "arguments"}}, or JSON text of one.'
        ) from error
    return calls
