"""Spread sequences over ranks and micro-batches so that each gets about the same work.

Every index from 0 to n-1 appears exactly once in the result, which depends on nothing but the arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.errors import ConfigError


def sequence_work(lengths: Sequence[int], hidden_size: int = 1024) -> list[int]:
    """Estimated work of each sequence, in arbitrary units: the linear layers cost about `12 * hidden_size`
    per token where causal attention costs its length, so a sequence of L tokens counts `L * (12 * hidden + L)`."""
    if hidden_size < 0:
        raise ConfigError(f"sequence_work: hidden_size is {hidden_size}, it must not be negative")
    per_token = 12 * hidden_size
    return [int(length) * (per_token + int(length)) for length in lengths]


@dataclass
class _Bin:
    """One bin of a partial solution. `size` breaks ties between equal sums, so that empty bins are filled first."""

    cost: float = 0
    members: list[int] = field(default_factory=list)

    @property
    def rank(self) -> tuple[float, int]:
        return (self.cost, len(self.members))

    def absorb(self, other: _Bin) -> _Bin:
        big, small = (self, other) if len(self.members) >= len(other.members) else (other, self)
        big.members.extend(small.members)
        big.cost += small.cost
        return big


def _merge(first: list[_Bin], second: list[_Bin], k: int) -> list[_Bin]:
    """Join two partial solutions, the heaviest part of one with the lightest of the other.

    Only parts that hold something are stored (heaviest first), the rest of the k are empty: with many parts
    and few sequences each this keeps a merge cheap."""
    overlap = len(first) + len(second) - k
    if overlap <= 0:
        merged = first + second
    else:
        long, short = (first, second) if len(first) >= len(second) else (second, first)
        alone_long, alone_short = len(long) - overlap, len(short) - overlap
        pairs = zip(long[alone_long:], reversed(short[alone_short:]), strict=True)
        merged = long[:alone_long] + short[:alone_short] + [a.absorb(b) for a, b in pairs]
    merged.sort(key=lambda part: part.rank, reverse=True)
    return merged


def karmarkar_karp(costs: Sequence[int | float], k: int) -> list[list[int]]:
    """Cut the indices of `costs` into k parts of about equal cost by the largest-differencing method.

    With at least k items no part is empty. Members are in ascending order, and so are the parts by their first member
    (empty parts last)."""
    if k < 1:
        raise ConfigError(f"karmarkar_karp: cannot cut into {k} parts, at least 1 is needed")
    values = [float(cost) if isinstance(cost, float) else int(cost) for cost in costs]
    if any(value < 0 or value != value for value in values):
        raise ConfigError("karmarkar_karp: every cost must be a number >= 0")
    n = len(values)
    order = sorted(range(n), key=lambda i: (-values[i], i))

    def spread(parts: list[_Bin]) -> float:
        return parts[0].cost - (parts[-1].cost if len(parts) == k else 0)

    groups = [[_Bin(values[i], [i])] for i in order]
    heap = [(-spread(parts), at, parts) for at, parts in enumerate(groups)]
    heapq.heapify(heap)
    counter = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        parts = _merge(first, second, k)
        heapq.heappush(heap, (-spread(parts), counter, parts))
        counter += 1
    result = [sorted(part.members) for part in heap[0][2]] if heap else []
    result.sort(key=lambda members: members[0] if members else n)
    return result + [[] for _ in range(k - len(result))]


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: always within the budget, and at most about 22 % more bins than the optimum."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in order:
        at = next((at for at, left in enumerate(free) if left >= lengths[i]), None)
        if at is None:
            bins.append([])
            free.append(max_tokens)
            at = len(bins) - 1
        bins[at].append(i)
        free[at] -= lengths[i]
    return bins


def _lightest_fit(
    order: Sequence[int], lengths: Sequence[int], work: Sequence[float], max_tokens: int, count: int
) -> list[list[int]] | None:
    """Longest first into the batch with the least work with enough free tokens; None where a sequence fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(count)]
    free = [max_tokens] * count
    load: list[float] = [0] * count
    for i in order:
        fitting = [at for at in range(count) if free[at] >= lengths[i]]
        if not fitting:
            return None
        at = min(fitting, key=lambda b: (load[b], b))
        bins[at].append(i)
        free[at] -= lengths[i]
        load[at] += work[i]
    return bins


def token_budget_batches(
    lengths: Sequence[int],
    max_tokens: int,
    min_count: int = 1,
    hidden_size: int = 1024,
) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `max_tokens` tokens, few of them, with even work.

    The budget is a hard bound; only a single sequence that is longer exceeds it, in a batch alone. At least
    `min_count` batches are made where there are that many sequences (ranks must agree on the number of steps).
    """
    sizes = _checked(lengths, max_tokens)
    work = sequence_work(sizes, hidden_size)
    alone = [[i] for i, size in enumerate(sizes) if size > max_tokens]
    rest = [i for i, size in enumerate(sizes) if size <= max_tokens]
    wanted = max(min(min_count, len(sizes)) - len(alone), 1)
    batches = alone + (_fit(rest, sizes, work, max_tokens, min(wanted, len(rest))) if rest else [])
    return sorted((sorted(batch) for batch in batches), key=lambda batch: batch[0])


def padded_budget_batches(
    lengths: Sequence[int], max_tokens: int, min_count: int = 1, rows: int = 1
) -> list[list[int]]:
    """As `token_budget_batches`, for batches that are padded to their longest sequence: rows times longest is within
    the budget. Each item is `rows` sequences that stay together, its length that of the longest of them.

    Neighbours in length share a batch, the longest with as few as must be: no other cut has fewer batches."""
    sizes = [max(length, 1) * rows for length in _checked(lengths, max_tokens)]
    batches: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if batches and (len(batches[-1]) + 1) * sizes[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    while len(batches) < min(min_count, len(sizes)):
        most = max(batches, key=lambda batch: (len(batch) > 1, len(batch) * sizes[batch[0]]))
        batches.append(most[len(most) // 2 :])
        del most[len(most) // 2 :]
    return sorted((sorted(batch) for batch in batches), key=lambda batch: batch[0])


def _checked(lengths: Sequence[int], max_tokens: int) -> list[int]:
    if max_tokens < 1:
        raise ConfigError(
            f"the token budget of a micro-batch is {max_tokens}, it must be at least 1 (ppo_max_token_len_per_gpu)"
        )
    sizes = [int(length) for length in lengths]
    if any(size < 0 for size in sizes):
        raise ConfigError("token_budget_batches: a sequence length is negative")
    return sizes


def _fit(
    indices: list[int], lengths: Sequence[int], work: Sequence[float], max_tokens: int, wanted: int
) -> list[list[int]]:
    """The fewest batches we can find (never fewer than `wanted`), even in work, each within the budget."""
    order = sorted(indices, key=lambda i: (-lengths[i], i))
    packed = _first_fit(order, lengths, max_tokens)
    total = sum(lengths[i] for i in indices)
    lowest = max(wanted, -(-total // max_tokens), 1)
    highest = max(wanted, len(packed))
    for count in range(lowest, highest + 1):
        parts = karmarkar_karp([work[i] for i in indices], count)
        batches = [[indices[j] for j in part] for part in parts if part]
        if all(sum(lengths[i] for i in batch) <= max_tokens for batch in batches):
            return batches
        even = _lightest_fit(order, lengths, work, max_tokens, count)
        if even is not None:
            return [batch for batch in even if batch]
    return packed
