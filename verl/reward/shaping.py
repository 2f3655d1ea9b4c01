"""Small pure changes to a score, made after a function has given it. Each is a callable of a sample and its
result and can be put behind any reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from verl.errors import ConfigError
from verl.reward.base import RewardResult, RewardSample

Shaper = Callable[[RewardSample, RewardResult], RewardResult]


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """DAPO's soft penalty: 0 up to `max_length - buffer` tokens, then linearly down to `-factor` at
    `max_length`."""
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


def overlong_shaper(max_length: int, buffer: int, factor: float) -> Shaper:
    """Subtracts the overlong penalty and reports it as `overlong_reward` and `overlong`."""
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"reward.overlong_buffer.len is {buffer}; it must be between 1 and "
            f"data.max_response_length={max_length}."
        )

    def shape(sample: RewardSample, result: RewardResult) -> RewardResult:
        if result.score is None:
            return result
        penalty = overlong_penalty(sample.response_length, max_length, buffer, factor)
        extra = {**result.extra, "overlong_reward": penalty, "overlong": float(penalty < 0)}
        return replace(result, score=result.score + penalty, extra=extra)

    return shape
