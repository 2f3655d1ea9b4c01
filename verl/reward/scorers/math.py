"""Mathematics: the boxed answer, equal to the reference as text, as a number, element by element, or symbolically.

What the quick comparisons cannot decide goes to math-verify, in a process that is killed when it takes too long: some
expressions keep a computer algebra system busy for ever. An answer that cannot be checked in time counts as wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

from verl.config.sections.reward import RewardConfig
from verl.requirements import install_command
from verl.reward.base import RewardSample
from verl.reward.functions import FunctionSpec
from verl.reward.scorers.text import last_boxed, normalise, split_top_level, to_decimal

_log = logging.getLogger(__name__)

SYMBOLIC_TIMEOUT_S = 3.0
_MAX_SYMBOLIC = 400  # characters; longer answers are compared as text only
_MAX_DIGITS = 2000

_TAIL = 300  # characters in which DAPO's answer is looked for
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_FRACTION = re.compile(r"^([-+]?)\\frac\{([-+]?[\d.]+)\}\{([-+]?[\d.]+)\}$")
_SLASH = re.compile(r"^([-+]?[\d.]+)/([-+]?[\d.]+)$")
_MIXED = re.compile(r"^([-+]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}$")


def compute_score(
    solution_str: str, ground_truth: Any, score: float = 1.0, format_score: float = 0.0, symbolic: bool = True
) -> dict[str, Any]:
    """`score` for the right boxed answer, `format_score` for a wrong one in a box, 0 without a box."""
    answer = last_boxed(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    right = any(equal(answer, truth, symbolic) for truth in references(ground_truth))
    return {"score": score if right else format_score, "acc": float(right), "pred": answer[:128]}


def compute_dapo_score(
    solution_str: str, ground_truth: Any, boxed: bool = False, symbolic: bool = True
) -> dict[str, Any]:
    """As the DAPO data has it: 1 where the response ends in the right `Answer: ...` (or box), else -1. Only its end is
    read, so that an early guess does not count."""
    tail = solution_str[-_TAIL:]
    stated = _ANSWER.findall(tail)
    answer = last_boxed(tail) if boxed else stated[-1].strip().strip("*").strip() if stated else None
    if answer is not None and (inner := last_boxed(answer)) is not None:
        answer = inner
    right = answer is not None and any(equal(answer, truth, symbolic) for truth in references(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": (answer or "")[:128]}


def references(ground_truth: Any) -> list[str]:
    """The accepted answers: one or a list of them; a whole solution gives its boxed answer."""
    items = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return [boxed if (boxed := last_boxed(str(item))) is not None else str(item) for item in items]


def equal(answer: str, truth: str, symbolic: bool = True) -> bool:
    """Whether two answers are the same."""
    left, right = normalise(answer), normalise(truth)
    decided = quickly_equal(left, right)
    if decided is not None:
        return decided
    return symbolic and symbolically_equal(left, right)


def quickly_equal(left: str, right: str) -> bool | None:
    """Whether two answers are the same as text or numbers; None where that does not decide it."""
    if left == right:
        return bool(left)
    if not left or not right:
        return False
    left_value, right_value = _value(left), _value(right)
    if left_value is not None and right_value is not None:
        exact = isinstance(left_value, Fraction) and isinstance(right_value, Fraction)
        if left_value != right_value and exact and ("%" in left) != ("%" in right):
            return left_value == right_value * 100 or left_value * 100 == right_value  # 50% is 50 and is 0.5
        return left_value == right_value
    pairs = _elements(left), _elements(right)
    if pairs[0] is not None and pairs[1] is not None:
        if pairs[0][0] != pairs[1][0] or len(pairs[0][1]) != len(pairs[1][1]):
            return None
        results = [quickly_equal(a, b) for a, b in zip(pairs[0][1], pairs[1][1], strict=True)]
        return True if all(results) else None
    if re.fullmatch(r"[a-zA-Z]{2,}", left) and re.fullmatch(r"[a-zA-Z]{2,}", right):
        return left.lower() == right.lower()
    return None


def _value(text: str) -> Fraction | Decimal | None:
    """An exact number; Decimal where it has too many digits for arithmetic."""
    text = text.removesuffix("%")
    sign = 1
    for pattern in (_FRACTION, _SLASH, _MIXED):
        match = pattern.match(text)
        if match is None:
            continue
        groups = list(match.groups())
        if pattern is not _SLASH:
            sign = -1 if groups.pop(0) == "-" else 1
        numbers = [_exact(group) for group in groups]
        if any(not isinstance(number, Fraction) for number in numbers) or numbers[-1] == 0:
            return None
        whole = numbers[0] if pattern is _MIXED else Fraction(0)
        return sign * (whole + numbers[-2] / numbers[-1])  # type: ignore[operator]
    return _exact(text)


def _exact(text: str) -> Fraction | Decimal | None:
    value = to_decimal(text)
    if value is None:
        return None
    _, digits, exponent = value.as_tuple()
    small = isinstance(exponent, int) and len(digits) <= _MAX_DIGITS and abs(exponent) <= _MAX_DIGITS
    return Fraction(value) if small else value


def _elements(text: str) -> tuple[str, list[str]] | None:
    """The brackets and the elements of a tuple, interval, set or bare list."""
    brackets = ""
    if text.startswith("\\{") and text.endswith("\\}"):
        brackets, text = "{}", text[2:-2]
    elif text[0] in "([" and text[-1] in ")]":
        brackets, text = text[0] + text[-1], text[1:-1]
    elements = list(split_top_level(text))
    return (brackets, elements) if len(elements) > 1 else None


# ---- algebra, in a process that can be killed

_lock = threading.Lock()
verifier: Any = None


def symbolically_equal(left: str, right: str) -> bool:
    """math-verify's verdict; False when it does not come in time."""
    global verifier
    if max(len(left), len(right)) > _MAX_SYMBOLIC or not _available():
        return False
    with _lock:
        if verifier is None:
            from verl.reward.pool import WorkerPool  # the pool's own worker imports this module

            spec = FunctionSpec("verl.reward.scorers.algebra:verify", label="math-verify")
            limits = RewardConfig(timeout_s=SYMBOLIC_TIMEOUT_S, memory_limit_mb=2048)
            verifier = WorkerPool([spec], limits, quiet=True)
        (result,) = verifier.submit(0, [RewardSample(0, "", left, ground_truth=right)]).result()
    return result.score == 1.0


@functools.cache
def _available() -> bool:
    if importlib.util.find_spec("math_verify") is not None:
        return True
    _log.warning(
        "math-verify is not installed: answers that differ as text and as numbers count as wrong. Install: %s",
        install_command("math"),
    )
    return False
