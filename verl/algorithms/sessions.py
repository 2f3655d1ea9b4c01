"""Rows that are turns of one conversation (`multi_turn.history=split`), seen as the conversation they come from.

The column `session` names the conversation of each row; its turns stand in order. Joined, a conversation is one row of
its policy tokens with a masked position after each turn; what was computed there is cut back into the rows.
"""

from __future__ import annotations

from typing import Any

from verl.algorithms.aggregation import as_bool
from verl.algorithms.groups import group_ids
from verl.algorithms.lazy_torch import Tensor, torch


class Sessions:
    """The S conversations of a batch of B rows; without a column (None) every row is one."""

    def __init__(self, column: Any | None, rows: int, device: torch.device | str = "cpu") -> None:
        self.ids, self.count = group_ids(range(rows) if column is None else column, device)
        """[B]: the conversation of each row, numbered in order of first appearance."""
        self.order = torch.argsort(self.ids, stable=True)
        """[B]: row numbers, conversation after conversation."""
        self.sizes = torch.bincount(self.ids, minlength=self.count)
        """[S]: rows of each."""
        self.starts = self.sizes.cumsum(0) - self.sizes
        """[S]: where each begins in `order`."""

    @property
    def first(self) -> Tensor:
        """[S]: the first row of each conversation."""
        return self.order[self.starts]

    def rows(self) -> list[Tensor]:
        """The row numbers of each conversation."""
        return list(self.order.split(self.sizes.tolist()))

    def sum(self, values: Tensor) -> Tensor:
        """[B] -> [S]."""
        return values.new_zeros(self.count).index_add_(0, self.ids, values)


class JoinedTokens:
    """Moves the policy tokens of a conversation's rows [B, T] into one row [S, W], and back."""

    def __init__(self, sessions: Sessions, response_mask: Tensor) -> None:
        self._flags = as_bool(response_mask)
        places = self._flags.sum(-1) + 1  # and the masked one that keeps turns apart
        in_order = places[sessions.order]
        before = in_order.cumsum(0) - in_order
        offset = torch.empty_like(places)
        offset[sessions.order] = before - before[sessions.starts].repeat_interleave(sessions.sizes)
        self._row = sessions.ids.unsqueeze(-1).expand_as(self._flags)[self._flags]
        self._column = (offset.unsqueeze(-1) + self._flags.cumsum(-1) - 1)[self._flags]
        widths = sessions.sum(places)
        self._shape = (sessions.count, int(widths.max()) if len(widths) else 0)

    def join(self, values: Tensor) -> Tensor:
        """Zero between turns and behind the last one."""
        joined = values.new_zeros(self._shape)
        joined[self._row, self._column] = values[self._flags]
        return joined

    def cut(self, joined: Tensor) -> Tensor:
        """Zero where the mask of the rows is 0."""
        values = joined.new_zeros(self._flags.shape)
        values[self._flags] = joined[self._row, self._column]
        return values
