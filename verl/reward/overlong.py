"""Changes to scores made after the functions have given them, one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from verl.errors import ConfigError
from verl.reward.base import RewardResult, RewardSample

Shaper = Callable[[Sequence[RewardSample], list[RewardResult]], list[RewardResult]]


def overlong_shaper(
    max_response_length: int, buffer_len: int, penalty_factor: float, report: bool = False
) -> Shaper:
    """Adds DAPO's overlong penalty; with `report` the extra values `overlong_reward` and `overlong` tell of it."""
    if not 0 < buffer_len <= max_response_length:
        raise ConfigError(
            f"reward.overlong_buffer.len is {buffer_len}; it must be between 1 and "
            f"data.max_response_length={max_response_length}."
        )

    def shape(samples: Sequence[RewardSample], results: list[RewardResult]) -> list[RewardResult]:
        import torch

        from verl.algorithms.sampling import overlong_penalty

        lengths = torch.tensor([sample.response_length for sample in samples], dtype=torch.long)
        penalties = overlong_penalty(lengths, max_response_length, buffer_len, penalty_factor).tolist()
        return [
            result if result.score is None else _add(result, penalty, report)
            for result, penalty in zip(results, penalties, strict=True)
        ]

    return shape


def _add(result: RewardResult, penalty: float, report: bool) -> RewardResult:
    told = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if report else {}
    return replace(result, score=(result.score or 0.0) + penalty, extra={**result.extra, **told})
