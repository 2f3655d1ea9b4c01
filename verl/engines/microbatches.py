"""Split a mini-batch into micro-batches.

Every row is in exactly one micro-batch. All ranks make the same number of them, because every pass over sharded
parameters is collective: a rank with fewer rows gets empty micro-batches at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.algorithms.balance import token_budget_batches
from verl.errors import ConfigError


@dataclass(frozen=True)
class MicroBatchSize:
    """Sequences or tokens per micro-batch; `max_tokens` wins where both are set. A sequence above it runs alone."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    hidden_size: int = 1024

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.max_sequences), ("tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"a micro-batch of {value} {name} is too small, it must be at least 1 "
                    "(ppo_micro_batch_size_per_gpu, ppo_max_token_len_per_gpu)"
                )


def split(
    lengths: Sequence[int], size: MicroBatchSize, largest: Callable[[int], int] | None = None
) -> list[list[int]]:
    """Row numbers of each micro-batch. `largest` returns the maximum of a number over ranks (None: one rank)."""
    batches = _split(lengths, size, 1)
    if largest is None:
        return batches
    count = largest(len(batches))
    if count > len(batches):
        batches = _split(lengths, size, count)
    return batches + [[] for _ in range(count - len(batches))]


def _split(lengths: Sequence[int], size: MicroBatchSize, min_count: int) -> list[list[int]]:
    if not lengths:
        return []
    if size.max_tokens is not None:
        return token_budget_batches(
            lengths, size.max_tokens, min_count=min_count, hidden_size=size.hidden_size
        )
    rows = size.max_sequences or len(lengths)
    return [list(range(at, min(at + rows, len(lengths)))) for at in range(0, len(lengths), rows)]
