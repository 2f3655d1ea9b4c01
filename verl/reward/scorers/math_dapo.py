"""Competition mathematics as the DAPO data has it: the response ends in a line `Answer: ...`; right is 1,
wrong -1.

Only the end of the response is read, so that an early guess does not count.
"""

from __future__ import annotations

import re
from typing import Any

from verl.reward.scorers.latex import last_boxed
from verl.reward.scorers.math import equal, references

_TAIL = 300
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def extract_answer(text: str, boxed: bool = False) -> str | None:
    """The last `Answer: ...` (or box) in the last 300 characters."""
    tail = text[-_TAIL:]
    if boxed:
        return last_boxed(tail)
    found = _ANSWER.findall(tail)
    if not found:
        return None
    answer = found[-1].strip().strip("*").strip()
    inner = last_boxed(answer)
    return answer if inner is None else inner


def compute_score(
    solution_str: str, ground_truth: Any, boxed: bool = False, symbolic: bool = True
) -> dict[str, Any]:
    answer = extract_answer(solution_str, boxed)
    right = answer is not None and any(equal(answer, truth, symbolic) for truth in references(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": (answer or "")[:128]}
