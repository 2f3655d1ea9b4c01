"""Components of a reward: correctness, format, length, in any mixture.

Every component is a reward function, so it works alone, in `reward.functions`, or inside `combine`:

    from verl.reward.scorers import gsm8k
    from verl.reward.scorers.shaping import combine, length_between, tagged

    compute_score = combine(
        correct=(gsm8k.compute_score, 1.0),
        form=(tagged("think", "answer"), 0.2),
        length=(length_between(10, 2000), 0.1),
    )

The score is the weighted sum; each component's score is reported under its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.reward.base import RewardSample
from verl.reward.functions import RewardFunction
from verl.reward.scoring import interpret

Component = Callable[..., Any]


def combine(**components: tuple[Component, float] | Component) -> Component:
    """A reward function that is the weighted sum of `name=(function, weight)`."""
    if not components:
        raise RewardError("combine() takes at least one component: combine(correct=(function, weight), ...).")
    bound: dict[str, tuple[RewardFunction, float]] = {}
    for name, component in components.items():
        function, weight = component if isinstance(component, tuple) else (component, 1.0)
        if not callable(function):
            raise RewardError(f"combine(): the component {name!r} is {function!r}, not a function.")
        ready = RewardFunction(function, name=name)
        if ready.signature.is_batch or ready.signature.is_async:
            raise RewardError(f"combine(): the component {name!r} must take one sample and not be async.")
        bound[name] = (ready, weight)

    def compute_score(
        solution_str: str,
        ground_truth: Any = None,
        data_source: str = "",
        prompt: str = "",
        extra_info: dict[str, Any] | None = None,
        response_length: int = 0,
        truncated: bool = False,
        **columns: Any,
    ) -> dict[str, Any]:
        columns.pop("response", None)
        about = (ground_truth, data_source, extra_info or {}, columns, response_length, truncated)
        sample = RewardSample(0, prompt, solution_str, *about)
        total = 0.0
        extra: dict[str, Any] = {}
        for name, (function, weight) in bound.items():
            result = interpret(function.call([sample]), name, sample)
            extra.update({key: value for key, value in result.extra.items() if key not in bound})
            extra[name] = result.score
            total += weight * (result.score or 0.0)
        return {"score": total, **extra}

    return compute_score


def matches(pattern: str, flags: int = re.DOTALL) -> Component:
    """1 where the whole response (without space around it) matches the regular expression."""
    compiled = re.compile(pattern, flags)

    def form(solution_str: str) -> float:
        return float(compiled.fullmatch(solution_str.strip()) is not None)

    return form


def tagged(*names: str) -> Component:
    """The share of the tags <name>...</name> that occur exactly once, in this order, without overlap."""
    if not names:
        raise RewardError("tagged() takes the names of tags, such as tagged('think', 'answer').")

    def form(solution_str: str) -> float:
        good, position = 0, 0
        for name in names:
            opening, closing = f"<{name}>", f"</{name}>"
            if solution_str.count(opening) != 1 or solution_str.count(closing) != 1:
                continue
            start, end = solution_str.index(opening), solution_str.index(closing)
            if position <= start < end:
                good, position = good + 1, end + len(closing)
        return good / len(names)

    return form


def length_between(shortest: int, longest: int, ramp: int = 0, unit: str = "characters") -> Component:
    """1 for a length in the range, 0 outside, linear over `ramp` on both sides. `unit`: characters, words or
    tokens."""
    if unit not in ("characters", "words", "tokens") or not 0 <= shortest <= longest or ramp < 0:
        raise RewardError(
            f"length_between({shortest}, {longest}, ramp={ramp}, unit={unit!r}): 0 <= shortest <= longest, ramp >= 0, "
            f"unit characters, words or tokens."
        )

    def length(solution_str: str, response_length: int = 0) -> float:
        size = _length(solution_str, response_length, unit)
        outside = max(shortest - size, size - longest, 0)
        return 1.0 if outside == 0 else max(0.0, 1.0 - outside / ramp) if ramp else 0.0

    return length


def length_penalty(free: int, per: float, worst: float = -1.0, unit: str = "characters") -> Component:
    """0 up to `free`, then -1 per `per` units beyond it, never below `worst`."""
    if per <= 0 or free < 0 or worst > 0:
        raise RewardError(f"length_penalty({free}, {per}, {worst}): free >= 0, per > 0, worst <= 0.")

    def penalty(solution_str: str, response_length: int = 0) -> float:
        size = _length(solution_str, response_length, unit)
        return max(worst, -max(0, size - free) / per)

    return penalty


def _length(text: str, tokens: int, unit: str) -> int:
    return tokens if unit == "tokens" else len(text.split()) if unit == "words" else len(text)


def not_truncated(truncated: bool = False) -> float:
    """1 for a response that came to its end."""
    return float(not truncated)
