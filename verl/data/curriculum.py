"""Prompts by their running pass rate (`data.curriculum=pass_rate`).

A batch depends only on what was drawn and scored before it, which a checkpoint holds: a resumed run draws what an
uninterrupted one draws.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from verl.config.schema import DataConfig
from verl.data.loader import BatchSource, EpochOrder, Loader
from verl.data.proto import DataProto
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)


class PassRateLoader(Loader):
    """Draws the prompts whose pass rate lies in `data.curriculum_window`.

    A batch has its share of prompts that were never drawn, its share of those outside the window, and for the rest
    those inside; of each kind the longest not drawn come first. Where one kind has too few, others fill the batch. No
    prompt is in a batch twice. An epoch is as many batches as the data fill, whichever prompts they hold."""

    def __init__(self, dataset: BatchSource, config: DataConfig, order: EpochOrder) -> None:
        super().__init__(dataset, config.train_batch_size, order=order)
        self._config = config
        self._forget()

    def _forget(self) -> None:
        self._rates = np.full(len(self.dataset), np.nan)
        """Of each prompt; NaN: no response to it has a score yet."""
        self._last = np.full(len(self.dataset), -1)
        """The number of the batch that had a prompt last; -1: none."""
        self._batches = 0
        self._drawn: dict[str, int] = {}
        """The positions of the newest batch, by uid."""
        self._counts: Counter[str] = Counter()
        """Of the prompts drawn since the last step, for its metrics."""

    def _inside(self) -> np.ndarray:
        lower, upper = self._config.curriculum_window
        return (self._rates >= lower) & (self._rates <= upper)

    def _quota(self, share: float) -> int:
        """This share of the next batch; fractions add up over batches."""
        before, after = (
            math.floor(batches * self._batch_size * share + 1e-9)
            for batches in (self._batches, self._batches + 1)
        )
        return after - before

    def _draw(self, positions: np.ndarray) -> np.ndarray:
        """The next batch; `positions` are all prompts, in the order of those that were drawn equally long ago."""
        ordered = positions[np.argsort(self._last[positions], kind="stable")]
        new, inside = self._last[ordered] < 0, self._inside()[ordered]
        unseen, outside = ordered[new], ordered[~new & ~inside]
        first, others = (
            self._quota(self._config.curriculum_unseen),
            self._quota(self._config.curriculum_outside),
        )
        parts = [unseen[:first], outside[:others], ordered[inside], unseen[first:], outside[others:]]
        drawn: np.ndarray = np.concatenate(parts)[: self._batch_size]
        self._counts += Counter(
            drawn=len(drawn),
            window=int(self._inside()[drawn].sum()),
            unseen=int((self._last[drawn] < 0).sum()),
        )
        self._last[drawn] = self._batches
        self._batches += 1
        return drawn

    def _plan(self, epoch: int, start: int) -> Iterator[tuple[int, np.ndarray, list[str]]]:
        positions = self._order.positions(epoch)
        while self._batches_after(start):
            drawn = self._draw(positions)
            # By the number of the draw: an epoch may have a prompt several times.
            uids = [f"{epoch}-{self.dataset.row_number(int(p))}.{start + n}" for n, p in enumerate(drawn)]
            self._drawn = dict(zip(uids, map(int, drawn), strict=True))
            start += len(drawn)
            yield start, drawn, uids

    def scored(self, batch: DataProto) -> None:
        """The responses to the newest batch have their scores: the first group of a prompt sets its rate, later ones
        move it."""
        for uid, group in scored_groups(batch).items():
            position, rate = self._drawn[uid], float(np.mean([passed for _, passed in group]))
            known, weight = self._rates[position], self._config.curriculum_weight
            self._rates[position] = rate if np.isnan(known) else (1 - weight) * known + weight * rate
            self._counts["signal"] += len({score for score, _ in group}) > 1

    def update(self, batch: DataProto) -> dict[str, float]:
        metrics, counts = super().update(batch), self._counts
        self._counts = Counter()
        seen = self._last >= 0
        return metrics | {
            **{
                f"curriculum/{name}": counts[name] / counts["drawn"]
                for name in ("signal", "window", "unseen")
            },
            "curriculum/prompts_in_window": float(self._inside()[seen].mean()),
            "curriculum/prompts_seen": float(seen.mean()),
        }

    def restart(self) -> None:
        super().restart()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        arrays = {"rates": self._rates, "last": self._last}
        copies = {name: torch.from_numpy(values.copy()) for name, values in arrays.items()}
        return {**super().state_dict(), "curriculum": {"batches": self._batches, **copies}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._forget()
        saved = state.get("curriculum")
        if saved is None:
            logger.warning(
                "the checkpoint holds no pass rates, as it was made without data.curriculum=pass_rate: every prompt "
                "counts as one that was never drawn"
            )
            return
        try:
            rates, last, batches = saved["rates"].numpy(), saved["last"].numpy(), int(saved["batches"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"The saved pass rates are damaged: {saved!r}.") from error
        if rates.shape != self._rates.shape or last.shape != self._last.shape:
            raise CheckpointError(
                f"The checkpoint holds the pass rates of {len(rates)} prompts, and there are {len(self._rates)}."
            )
        self._rates, self._last, self._batches = rates.copy(), last.copy(), batches


def scored_groups(batch: DataProto) -> dict[str, list[tuple[float, float]]]:
    """By prompt, of each response that has a score: the score, and how far it passes, which is its `acc`, or the score
    where the reward function does not give one for the whole group."""
    columns, scores = batch.non_tensor_batch, batch.batch["token_level_scores"].sum(-1).tolist()
    rows_of: dict[str, list[int]] = {}
    for row, error in enumerate(columns["reward_error"]):
        if error is None:
            rows_of.setdefault(columns["uid"][row], []).append(row)
    groups = {}
    for uid, rows in rows_of.items():
        acc = [columns["reward_extra"][row].get("acc") for row in rows]
        passes = [scores[row] for row in rows] if None in acc else [float(value) for value in acc]
        groups[uid] = list(zip([scores[row] for row in rows], passes, strict=True))
    return groups
