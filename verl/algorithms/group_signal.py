"""What a few responses to each prompt say about the groups of a run: how many will differ in score, with how many
responses each, and which pass rates that needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.errors import DataError

SIZES = (2, 4, 8, 16, 32, 64)
"""Group sizes that are compared."""
LEAST = 4
"""The smallest that is proposed: the baseline of a smaller group is little more than one other response."""
BEYOND = 4
"""Rates are extrapolated to groups this many times as large as those that were drawn."""


def differs_at_k(scores: Sequence[float], k: int) -> float:
    """The chance that k of these responses, each subset of k equally likely, do not all have the same score."""
    if not 1 <= k <= len(scores):
        raise DataError(f"a group of {k} needs at least as many responses, not {len(scores)}")
    same = sum(math.comb(count, k) for count in Counter(scores).values())
    return 1 - same / math.comb(len(scores), k)


def signal_chance(rate: float, n: int) -> float:
    """The chance that n responses that pass at this rate are not all right or all wrong."""
    return 1.0 - rate**n - (1 - rate) ** n


def signal_window(n: int) -> tuple[float, float]:
    """The least and largest pass rate at which a group of n has signal at least half as often as at 1/2, the best."""
    low, high, chance = 0.0, 0.5, signal_chance(0.5, n) / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if signal_chance(middle, n) >= chance else (middle, high)
    return high, 1 - high


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share seen in `count` draws (Wilson 1927); for means of values from 0 to 1 it is at
    least as wide as it must be."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def beta_signal(mean: float, variance: float, n: int) -> float:
    """The share of groups of n with signal, where pass rates have a beta distribution of this mean and variance."""
    if variance < 1e-9:
        return signal_chance(mean, n)
    total = mean * (1 - mean) / variance - 1
    if total < 1e-9:
        return 0.0  # every prompt always passes or never does
    a, b = mean * total, (1 - mean) * total
    # E p^n = prod (a + i) / (a + b + i).
    right, wrong = (math.prod((x + i) / (total + i) for i in range(n)) for x in (a, b))
    return 1 - right - wrong


def rate_moments(passed: Sequence[int], responses: Sequence[int]) -> tuple[float, float]:
    """Mean and variance of the pass rates behind these counts, without the spread that chance adds."""
    k, n = np.asarray(passed, dtype=np.float64), np.asarray(responses, dtype=np.float64)
    mean = float((k / n).mean())
    return mean, max(0.0, float((k * (k - 1) / (n * (n - 1))).mean()) - mean * mean)


@dataclass(frozen=True)
class SizeSignal:
    """What groups of one size would have."""

    n: int
    share: float
    """Of groups with signal."""
    low: float
    high: float
    """Its 95 % interval."""
    extrapolated: bool

    @property
    def per_response(self) -> float:
        """Groups with signal per response."""
        return self.share / self.n


def signal_by_size(groups: Sequence[Sequence[float]], passes: Sequence[Sequence[float]]) -> list[SizeSignal]:
    """For each group size: up to the one that was drawn from the scores themselves, beyond it from the pass rates.
    There is nothing beyond it where responses do not simply pass or fail. Groups need two responses or more; one with
    fewer than others, as some have no score, counts for the sizes it can have."""
    drawn = max(len(group) for group in groups)
    counts = [(int(sum(group)), len(group)) for group in passes]
    moments = rate_moments(*zip(*counts, strict=True)) if all_pass_or_fail(passes) else None
    found = []
    for n in sorted({*SIZES, drawn}):
        chances = [differs_at_k(group, min(n, drawn)) for group in groups if len(group) >= min(n, drawn)]
        share = float(np.mean(chances))
        if n > drawn:
            if moments is None or n > BEYOND * drawn:
                break
            share = min(1.0, share + beta_signal(*moments, n) - beta_signal(*moments, drawn))
        found.append(SizeSignal(n, share, *wilson_interval(share, len(chances)), extrapolated=n > drawn))
    return found


def all_pass_or_fail(passes: Sequence[Sequence[float]]) -> bool:
    """Whether every response passes or fails, and none in part."""
    return all(value in (0, 1) for group in passes for value in group)


def proposed_size(sizes: Sequence[SizeSignal], share: float) -> SizeSignal | None:
    """The smallest group of which this share has signal: more responses to a prompt cost as many prompts, and per
    response small groups have signal most often."""
    return next((each for each in sizes if each.n >= LEAST and each.share >= share), None)
