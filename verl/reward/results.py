"""Believe a reward function's answer, or say exactly why not.

Whatever passes `interpret` is a finite float with a dict of plain extra values, so nothing behind it ever
meets a None, a NaN or a tensor. Python truth values count as 1 and 0.
"""

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
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            raise _unusable(
                value, function, sample, "a dict without the key 'score'", "Return {'score': number, ...}."
            )
        extra = {_clip(str(key)): plain(item) for key, item in value.items() if key != "score"}
        return RewardResult(_number(value["score"], function, sample, value), extra)
    return RewardResult(_number(value, function, sample, value))


def interpret_batch(value: Any, function: str, samples: Sequence[RewardSample]) -> list[Any]:
    """The list of per-sample values in a batch function's answer: a sequence of results, or a dict of
    sequences."""
    if isinstance(value, Mapping) and "score" in value:
        columns = {key: _as_list(items) for key, items in value.items()}
        wrong = {key: items for key, items in columns.items() if items is None or len(items) != len(samples)}
        if not wrong:
            # type: ignore[arg-type]
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        key, items = next(iter(wrong.items()))
        seen = f"a dict whose {key!r} has " + ("no length" if items is None else f"{len(items)} items")
    else:
        listed = _as_list(value)
        if listed is not None and len(listed) == len(samples):
            return listed
        seen = f"{type(value).__name__} {_show(value)}" if listed is None else f"{len(listed)} scores"
    raise RewardError(
        f"Reward function {function} was given {len(samples)} completions and returned {seen}. "
        f"A batch function must return one score (or one dict with 'score') per completion, in order."
    )


def plain(value: Any) -> Any:
    """Numbers as Python numbers, text and small lists as they are, anything else as its repr: what JSON can
    carry."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, int):
        # str() of it may be refused by Python
        return int(value) if abs(value) < 2**63 else "a very large integer"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple) and len(value) <= 64:
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and len(value) <= 64:
        return {_clip(str(key)): plain(item) for key, item in value.items()}
    item = getattr(value, "item", None)
    size = getattr(value, "size", None)
    if callable(item) and (size is None or (isinstance(size, int) and size == 1) or _is_single_tensor(value)):
        try:
            return plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            pass
    return _clip(repr(value))


def _is_single_tensor(value: Any) -> bool:
    numel = getattr(value, "numel", None)
    return callable(numel) and numel() == 1


def _number(value: Any, function: str, sample: RewardSample, returned: Any) -> float:
    given = value
    if value is None:
        raise _unusable(
            returned, function, sample, "None", "Return a number on every path through the function."
        )
    if isinstance(value, str | bytes):
        raise _unusable(returned, function, sample, "text", "Return float(...) of it.")
    if not isinstance(value, bool | int | float):
        try:
            value = float(given)  # numpy scalars, 0-d tensors, Decimal, Fraction
        except (TypeError, ValueError, RuntimeError, OverflowError):
            kind = f"a {type(given).__name__}"
            raise _unusable(returned, function, sample, kind, "Return one number per sample.") from None
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _unusable(
            returned, function, sample, str(number), "Return a finite number, clipped to a sensible range."
        )
    return number


def _unusable(value: Any, function: str, sample: RewardSample, kind: str, fix: str) -> RewardError:
    return RewardError(
        f"Reward function {function} returned {kind} ({_show(value)}) for row {sample.index} "
        f"(response {_show(sample.response)}); a score must be a finite number or a dict with 'score'. {fix}"
    )


def _as_list(value: Any) -> list[Any] | None:
    if isinstance(value, str | bytes | Mapping):
        return None
    if isinstance(value, Sequence):
        return list(value)
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        listed = tolist()
        return listed if isinstance(listed, list) else None
    return None


def _show(value: Any, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ may raise anything
        text = f"<unprintable {type(value).__name__}: {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _clip(text: str) -> str:
    return text if len(text) <= _EXTRA_LIMIT else text[: _EXTRA_LIMIT - 3] + "..."
