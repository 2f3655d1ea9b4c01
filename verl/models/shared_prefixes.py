"""Common beginnings of rows, such as the prompt of a group, which a pack has once.

In lexicographic order a row shares most with its neighbours: rows form a tree whose nodes are the tokens that some rows
share. A token's hidden state depends on the tokens before it only, so that one computation of a node serves all its
rows. (Not where rotary frequencies depend on the length of the row.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from verl.models.attention import (
    RAGGED,
    AttentionCall,
    RaggedBounds,
    dense_runs,
    ragged_attention,
    send,
)
from verl.models.kernels import triton_fault

FEWEST_SHARED = 8
"""A common beginning of fewer tokens gets no node: attention over it would cost more than it saves."""
_KEY_SHARE = 8
"""Keys and values of a beginning are copied for each row. They are about this part of a token's activations, or less
(an eighth in a model without grouped heads), and count as much in the token budget."""


class Node(NamedTuple):
    """Positions `start` to `end` of the rows `first` to `last` in lexicographic order, which all share them."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class PrefixTree:
    tokens: np.ndarray
    """[B, L]: the attended tokens of each row from the first column on, each plus one; 0 behind them."""
    lengths: np.ndarray
    order: np.ndarray
    """Lexicographic."""
    shared: np.ndarray
    """How many tokens each row of `order` begins with as the one before it does; 0 for the first."""

    @staticmethod
    def of(input_ids: np.ndarray, attention_mask: np.ndarray, together: int | None = None) -> PrefixTree:
        """`together`: only so many consecutive rows share anything."""
        attended = attention_mask != 0
        lengths = attended.sum(axis=1)
        rows, length = len(lengths), int(lengths.max(initial=1))
        tokens = np.zeros((rows, length), dtype=np.int64)
        tokens[np.arange(length) < lengths[:, None]] = input_ids[attended] + 1
        unit = np.arange(rows) // (together or max(rows, 1))
        keys = np.concatenate([unit[:, None] + 1, tokens], axis=1).astype(">u4")
        order = keys.view(f"S{keys.shape[1] * 4}")[:, 0].argsort(kind="stable")
        ordered, shared = tokens[order], np.zeros(rows, dtype=np.int64)
        differ = np.ones((max(rows - 1, 0), length + 1), dtype=bool)
        differ[:, :-1] = (ordered[1:] != ordered[:-1]) | (ordered[1:] == 0)
        shared[1:] = differ.argmax(axis=1) * (unit[order[1:]] == unit[order[:-1]])
        return PrefixTree(tokens, lengths, order, shared)

    def nodes(self) -> list[Node]:
        """Every token of every row is in one of them; a node comes before those that continue it."""
        found: list[Node] = []
        lengths: list[int] = self.lengths[self.order].tolist()
        pending = [(0, len(lengths), 0)] if lengths else []
        while pending:
            first, last, depth = pending.pop()
            if last - first == 1:
                if lengths[first] > depth:
                    found.append(Node(depth, lengths[first], first, last))
                continue
            inner = self.shared[first + 1 : last]
            common = int(inner.min())
            if common - depth >= FEWEST_SHARED:
                found.append(Node(depth, common, first, last))
                depth = common
            cuts = np.flatnonzero(inner < max(depth + FEWEST_SHARED, common + 1)) + first + 1
            pending += [(a, b, depth) for a, b in pairwise([first, *cuts.tolist(), last])]
        # A node ends where those that continue it begin; neighbours of one shape are one batch of dense attention.
        return sorted(found, key=lambda node: (node.end, node.end - node.start))

    def costs(self) -> np.ndarray:
        """Of each row in `order`: how many tokens it adds, at most, to a micro-batch that has the row before it."""
        copied = np.maximum(-(-self.shared // _KEY_SHARE), FEWEST_SHARED - 1)
        return self.lengths[self.order] - np.maximum(self.shared - copied, 0)  # type: ignore[no-any-return]

    def part(self, rows: Sequence[int]) -> PrefixTree:
        """The tree of some rows, at least one."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        kept = np.asarray(rows)
        order = place[kept].argsort()
        at, shared = place[kept][order], np.zeros(len(kept), dtype=np.int64)
        if len(kept) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: at[-1] + 1], at[:-1] + 1)
        return PrefixTree(self.tokens[kept], self.lengths[kept], order, shared)

    def units(self, prompts: Sequence[int], most: int) -> tuple[list[list[int]], np.ndarray]:
        """Rows whose common beginning is more than half of the longer prompt, in units of at most `most` tokens (or
        one row); and the tokens that each row adds to its unit."""
        units: list[list[int]] = []
        order, added = self.order.tolist(), self.lengths.copy()
        marginal, shared, tokens = self.costs().tolist(), self.shared.tolist(), 0
        for at, row in enumerate(order):
            alike = at > 0 and 2 * shared[at] > max(prompts[row], prompts[order[at - 1]])
            if alike and tokens + marginal[at] <= most:
                units[-1].append(row)
                added[row] = marginal[at]
            else:
                units.append([row])
                tokens = 0
            tokens += int(added[row])
        return units, added


def prompt_lengths(attention_mask: np.ndarray, response_mask: np.ndarray) -> list[int]:
    """Attended tokens of each row before the first that has an output; all of them where none has."""
    attended, wanted = attention_mask != 0, response_mask != 0
    columns = attended.shape[1]
    first = np.where(wanted.any(axis=1), columns - wanted.shape[1] + wanted.argmax(axis=1), columns)
    lengths: list[int] = (attended & (np.arange(columns) < first[:, None])).sum(axis=1).tolist()
    return lengths


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lengths[0] numbers), then those from starts[1] on, and so forth."""
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


class SharedPrefixAttention:
    """Attention of a pack in which common beginnings of rows are there once.

    The pack consists of segments with (queries, keys) each: the queries are its own tokens, the keys those of its
    beginning and its own, `key_index` in the pack. Each is an ordinary causal attention in which the last query sees
    the last key."""

    def __init__(
        self, segments: Sequence[tuple[int, int]], key_index: np.ndarray, device: torch.device
    ) -> None:
        self.segments, self.key_index, self._device = tuple(segments), key_index, device
        self.lengths, self.key_lengths = zip(*segments, strict=True)

    @cached_property
    def _inputs(self) -> SharedInputs:
        """Made when they are first needed: a captured pass has its own."""
        return SharedInputs.of(self.lengths, self.key_lengths, self.key_index, self._device)

    @cached_property
    def _bounds(self) -> RaggedBounds:
        return self._inputs.ragged(max(self.lengths), max(self.key_lengths))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        longest = max(self.key_lengths)
        call = self._inputs.copied(call.within(longest))
        backend = call.backend(len(self.segments), longest)
        if backend not in RAGGED:
            return dense_runs(call, self.segments)
        return ragged_attention(backend, call, self._bounds)


class SharedInputs(NamedTuple):
    """What attention over shared beginnings reads from the device."""

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    rows: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor

    @staticmethod
    def of(
        lengths: Sequence[int], key_lengths: Sequence[int], key_index: np.ndarray, device: torch.device
    ) -> SharedInputs:
        queries, keys = (send(bounds_of(side), device) for side in (lengths, key_lengths))
        return SharedInputs(queries, keys, *RowCopies.of(key_index, sum(lengths), device))

    def copied(self, call: AttentionCall) -> AttentionCall:
        """With the keys and values of each segment one after the other."""
        copies = RowCopies(self.rows, self.order, self.bounds)
        return call.on(call.q, copy_tokens(call.k, copies), copy_tokens(call.v, copies))

    def ragged(self, longest: int, longest_keys: int) -> RaggedBounds:
        """Of the queries and the copied keys."""
        return RaggedBounds(self.cu_queries, longest, self.cu_keys, longest_keys)


def bounds_of(lengths: Sequence[int]) -> np.ndarray:
    """0, lengths[0], lengths[0] + lengths[1], ..."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class RowCopies(NamedTuple):
    """Which rows of a tensor are copied. The gradients of a row's copies are summed in float32 and in a fixed order."""

    rows: torch.Tensor
    """The row that each copy is of."""
    order: torch.Tensor
    """The copies by their rows: those of row i are order[bounds[i] : bounds[i + 1]]."""
    bounds: torch.Tensor

    @staticmethod
    def of(rows: np.ndarray, count: int, device: torch.device) -> RowCopies:
        """Of a tensor with `count` rows (and maybe more). The device sorts them; a CPU adds without."""
        sent = send(rows, device)
        if device.type == "cpu":
            return RowCopies(sent, sent[:0], sent[:0])
        return RowCopies(sent, *sorted_copies(sent, count))


def sorted_copies(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` and `bounds` of `RowCopies`."""
    ordered, order = rows.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device))


def copy_rows(x: torch.Tensor, copies: RowCopies) -> torch.Tensor:
    """[N or more, ...] -> [M, ...]."""
    return cast(torch.Tensor, _CopyRows.apply(x, copies))


def copy_tokens(x: torch.Tensor, copies: RowCopies) -> torch.Tensor:
    """[1, H, N, D] -> [1, H, M, D]."""
    return copy_rows(x.squeeze(0).transpose(0, 1), copies).transpose(0, 1).unsqueeze(0)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copies: RowCopies) -> torch.Tensor:
        ctx.copies, ctx.rows = copies, len(x)
        return x.index_select(0, copies.rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        copies: RowCopies = ctx.copies
        if grad.is_cuda and grad.dtype != torch.float64 and triton_fault(grad.device) is None:
            from verl.models.kernels.layers import sum_copies

            return sum_copies(grad.contiguous(), copies.order, copies.bounds, ctx.rows), None
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.rows, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, copies.rows, grad.to(wide)).to(grad.dtype), None
