"""A distribution of lengths as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def nice_edges(low: int, high: int, bins: int) -> list[int]:
    """Edges at round numbers (1, 2 or 5 times a power of ten apart), about `bins` of them, covering low to high."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if (high - low) // (step * factor) < bins:
                width = step * factor
                start = low - low % width
                return list(range(start, high + width + 1, width))
        step *= 10


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of the width; anything above nothing is visible."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def histogram(
    values: Sequence[int] | np.ndarray, *, bins: int = 12, width: int = 40, limit: int | None = None
) -> str:
    """One line per bin: range, bar, count; bins wholly above `limit` are marked."""
    numbers = np.asarray(values)
    if not numbers.size:
        return "  (nothing)"
    edges = nice_edges(int(numbers.min()), int(numbers.max()), bins)
    counts = [int(((numbers >= a) & (numbers < b)).sum()) for a, b in pairwise(edges)]
    while counts and counts[-1] == 0:
        counts.pop()
    label = len(str(edges[len(counts)]))
    lines = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        mark = "  over the limit" if limit is not None and left > limit and count else ""
        drawn = bar(count / max(counts), width)
        lines.append(f"  {left:>{label}} - {right - 1:>{label}}  {drawn:<{width}} {count:>7}{mark}")
    return "\n".join(lines)
