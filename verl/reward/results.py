"""Checks what a reward function returned: every accepted score is a finite float with plain extra values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import RewardError
from verl.reward.base import RewardResult, RewardSample

_EXTRA_LIMIT = 2000  # characters kept of an extra value that is not a number, and of its name


def interpret(value: Any, function: str, sample: RewardSample) -> RewardResult:
    """The result for one sample, from what `function` returned for it."""
    if isinstance(value, RewardResult):
        if value.score is None and value.error:
            return value
        value = {**value.extra, "score": value.score}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise _unusable(
                value, function, sample, "a dict without the key 'score'", "Return {'score': number, ...}."
            )
        extra = {_clip(str(key)): plain(item) for key, item in value.items() if key != "score"}
        return RewardResult(_number(value["score"], function, sample, value), extra)
    return RewardResult(_number(value, function, sample, value))


def interpret_batch(value: Any, function: str, samples: Sequence[RewardSample]) -> list[RewardResult]:
    """The results from what a batch function returned: a sequence of scores or dicts, or a dict of sequences. One bad
    score does not spoil the others."""
    results = []
    for sample, item in zip(samples, _per_sample(value, function, len(samples)), strict=True):
        try:
            results.append(interpret(item, function, sample))
        except RewardError as error:
            results.append(RewardResult(None, error=str(error)))
    return results


def _per_sample(value: Any, function: str, count: int) -> list[Any]:
    if isinstance(value, Mapping) and "score" in value:
        columns = {key: _as_list(items) for key, items in value.items()}
        wrong = {key: items for key, items in columns.items() if items is None or len(items) != count}
        if not wrong:
            return [{key: items[row] for key, items in columns.items() if items} for row in range(count)]
        key, items = next(iter(wrong.items()))
        seen = f"a dict whose {key!r} has " + ("no length" if items is None else f"{len(items)} items")
    else:
        listed = _as_list(value)
        if listed is not None and len(listed) == count:
            return listed
        seen = f"{type(value).__name__} {_show(value)}" if listed is None else f"{len(listed)} scores"
    raise RewardError(
        f"Reward function {function} was given {count} completions and returned {seen}. A batch function must return "
        f"one score (or dict with 'score') per completion, in order."
    )


def plain(value: Any) -> Any:
    """What JSON can carry: numbers as Python numbers, text and small collections as they are, anything else as repr."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, int):
        # str() of a longer one may be refused by Python
        return int(value) if abs(value) < 2**63 else "a very large integer"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple) and len(value) <= 64:
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and len(value) <= 64:
        return {_clip(str(key)): plain(item) for key, item in value.items()}
    try:  # numpy scalars and tensors with one element; others raise
        return plain(value.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return _clip(repr(value))


def _number(value: Any, function: str, sample: RewardSample, returned: Any) -> float:
    if value is None:
        raise _unusable(returned, function, sample, "None", "Return a number on every path.")
    if isinstance(value, str | bytes):
        raise _unusable(returned, function, sample, "text", "Return float(...) of it.")
    try:
        number = float(value)  # also numpy scalars, 0-d tensors, Decimal, Fraction
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        kind = f"a {type(value).__name__}"
        raise _unusable(returned, function, sample, kind, "Return one number per sample.") from None
    if not math.isfinite(number):
        raise _unusable(returned, function, sample, str(number), "Return a finite number.")
    return number


def _unusable(value: Any, function: str, sample: RewardSample, kind: str, fix: str) -> RewardError:
    return RewardError(
        f"Reward function {function} returned {kind} ({_show(value)}) for row {sample.index} "
        f"(response {_show(sample.response)}); a score must be a finite number or a dict with 'score'. {fix}"
    )


def _as_list(value: Any) -> list[Any] | None:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    listed = value.tolist() if callable(getattr(value, "tolist", None)) else None
    return listed if isinstance(listed, list) else None


def _show(value: Any, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ may raise anything
        text = f"<unprintable {type(value).__name__}: {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _clip(text: str) -> str:
    return text if len(text) <= _EXTRA_LIMIT else text[: _EXTRA_LIMIT - 3] + "..."
