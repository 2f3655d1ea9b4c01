"""How waiting responses are handed out to whoever is free. Pure: it knows neither clocks nor processes.

What always holds: a piece is never empty while something waits; the dearest responses go first, so that what is left
for the end is small and all finish about together.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl.algorithms.balance import sequence_work
from verl.reward.base import RewardSample

CHARACTERS_PER_TOKEN = 4
MOST_BATCHES = 8
"""Forward passes in one piece, at most: what arrives later is shared out among all again."""


def estimated_work(sample: RewardSample, hidden_size: int) -> int:
    """Of one conversation, from its length in characters: its tokens are counted where the tokenizer is."""
    characters = len(sample.prompt) + len(sample.response)
    return sequence_work([1 + characters // CHARACTERS_PER_TOKEN], hidden_size)[0]


def next_piece(work: Sequence[int], takers: int, batch_size: int) -> list[int]:
    """Positions in `work` of what one of `takers` gets now: its share of the work that waits, and at least a forward
    pass of `batch_size` where there is that much for everybody."""
    if not work:
        return []
    order = sorted(range(len(work)), key=lambda position: (-work[position], position))
    least = min(batch_size, -(-len(work) // takers))
    share = sum(work) / takers
    taken, sum_taken = 0, 0
    while taken < len(order) and taken < MOST_BATCHES * batch_size:
        if taken >= least and sum_taken + work[order[taken]] > share:
            break
        sum_taken += work[order[taken]]
        taken += 1
    return order[:taken]
