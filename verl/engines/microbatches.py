"""Cut a mini-batch into micro-batches.

What always holds: every row is in exactly one micro-batch; with a token budget no micro-batch of more than one
sequence is above it; all ranks make the same number of micro-batches, because sharded parameters are gathered in
step. A rank with fewer rows than others gets empty micro-batches at the end, which it runs for the gathering only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.algorithms.balance import token_budget_batches
from verl.errors import ConfigError


@dataclass(frozen=True)
class CutRule:
    """Either a number of sequences or a number of tokens per micro-batch; `max_tokens` wins where both are set."""

    max_sequences: int | None = None
    max_tokens: int | None = None
    hidden_size: int = 1024

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.max_sequences), ("tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"a micro-batch of {value} {name} cannot be made, it must be at least 1 "
                    "(ppo_micro_batch_size_per_gpu, ppo_max_token_len_per_gpu)"
                )


def cut(lengths: Sequence[int], rule: CutRule, agree: Callable[[int], int] | None = None) -> list[list[int]]:
    """Row numbers of each micro-batch. `agree` returns the maximum of a number over ranks (None: one rank)."""
    parts = _cut_alone(lengths, rule, 1)
    if agree is None:
        return parts
    count = agree(len(parts))
    if count > len(parts):
        parts = _cut_alone(lengths, rule, count)
    return parts + [[] for _ in range(count - len(parts))]


def _cut_alone(lengths: Sequence[int], rule: CutRule, at_least: int) -> list[list[int]]:
    if not lengths:
        return []
    if rule.max_tokens is not None:
        return token_budget_batches(
            lengths, rule.max_tokens, min_count=at_least, hidden_size=rule.hidden_size
        )
    size = rule.max_sequences or len(lengths)
    return [list(range(at, min(at + size, len(lengths)))) for at in range(0, len(lengths), size)]
