"""Pairs of a chosen and a rejected answer to one prompt, for preference training and reward models.

A pair is consecutive rows of a batch: chosen, rejected and, for kto, the chosen answer of another pair to this prompt.
Pairs with equal answers, also those that are equal once they are cut, are dropped and counted. All pairs are encoded at
start, so that one that cannot be used is found before a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from verl.config.methods import PREFERENCE_LOSS, find_method
from verl.config.sections.preference import PreferenceAlgorithmConfig
from verl.data.columns import as_number, require_column
from verl.data.conversations import Row, pair_rows
from verl.data.dataset import EncodedRows, encoded_loader
from verl.data.files import Files, Rows
from verl.data.loader import Loader
from verl.data.proto import DataProto
from verl.data.sft_dataset import Encoded, fit_encoded, pad_encoded
from verl.data.tokenizer import truncate
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config.schema import PreferenceConfig, PreferenceDataConfig

logger = logging.getLogger(__name__)

Use = Literal["pairs", "kto", "reward"]
"""What the rows are for: log-probs of the answers; with a third row for kto's KL; the reward of each conversation."""


def use_of(config: PreferenceConfig) -> Use:
    algorithm = getattr(config, "algorithm", None)
    if isinstance(algorithm, PreferenceAlgorithmConfig):
        method = find_method(PREFERENCE_LOSS, algorithm.loss)
        return "pairs" if method is None or method.compares_responses else "kto"
    return "reward"


@dataclass(frozen=True)
class PreferenceItem:
    """The rows of one pair, each with the prompt in front: chosen, rejected, for kto a third one."""

    rows: tuple[Encoded, ...]
    index: int
    margin: float = 0.0


class PreferenceDataset(EncodedRows[PreferenceItem]):
    """Rows with `prompt`, `chosen` and `rejected`: strings or messages. Without a prompt column, the answers are
    conversations, and what they share at their beginning is the prompt."""

    def __init__(
        self,
        config: PreferenceDataConfig,
        files: Files | Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        training: bool = True,
        use: Use = "pairs",
    ) -> None:
        super().__init__(config, files, tokenizer, training)
        self.config = config
        self.use = use
        self.reference: np.ndarray | None = None
        """[pairs, rows of each]: the reference's log-probs of the answers, once they are known."""
        self._keys = (config.prompt_key, config.chosen_key, config.rejected_key)
        require_column(self.rows, config.chosen_key, "data.chosen_key", "response", self.files_key)
        require_column(self.rows, config.rejected_key, "data.rejected_key", "response", self.files_key)
        self.items = self._encode_all(self._chosen)
        if use == "kto":
            self._add_other_answers()

    def _encode_all(self, chosen_rows: np.ndarray) -> list[PreferenceItem]:
        items: list[PreferenceItem] = []
        config, total = self.config, len(chosen_rows)
        same = cut = lost = alike = longest = 0
        for start in range(0, total, 512):
            numbers = [int(number) for number in chosen_rows[start : start + 512]]
            encoded = [side for number in numbers for side in self._pair(number)]
            for number, chosen, rejected in zip(numbers, encoded[::2], encoded[1::2], strict=True):
                if chosen == rejected:
                    same += 1
                    continue
                length = max(len(chosen[0]), len(rejected[0]))
                if length > config.max_length:
                    cut += 1
                    longest = max(longest, length)
                    if config.truncation == "error":
                        continue
                sides = tuple(self._fit(*side) for side in (chosen, rejected))
                if any(not side[1].any() for side in sides):
                    lost += 1
                    continue
                if np.array_equal(sides[0], sides[1]):
                    alike += 1
                    continue
                items.append(PreferenceItem(sides, number, self._margin(number)))
        self._report(total, len(items), same, cut, lost, alike, longest)
        return items

    def _fit(self, ids: list[int], mask: list[int]) -> Encoded:
        """Cut to data.max_length; the token that asks for the reward stays, wherever the conversation is cut."""
        limit, how = self.config.max_length, self.config.truncation
        if self.use == "reward":
            ids = [*truncate(ids[:-1], limit - 1, how), ids[-1]]
            mask = mask[len(mask) - len(ids) :]
        return fit_encoded(ids, mask, limit, how)

    def _margin(self, number: int) -> float:
        name = getattr(self.config, "margin_key", None)
        if self.use != "reward" or name not in self.rows.column_names:
            return 0.0
        value = self.rows[number].get(name)
        if value is None or value == "":  # which an empty cell of a CSV file is
            return 0.0
        margin = as_number(value)
        if isinstance(value, bool) or not np.isfinite(margin):
            raise DataError(
                f"{self.files_key}: '{name}' (data.margin_key) of {self.rows.origin(number)} is {value!r}; it must be "
                "a finite number."
            )
        return margin

    def _add_other_answers(self) -> None:
        """kto's third row: this prompt with the chosen answer of the next pair."""
        items = self.items
        if len(items) < 2:
            raise DataError(
                f"{self.files_key}: algorithm.loss=kto needs at least 2 pairs, and there is {len(items)}."
            )
        self.items = [
            PreferenceItem(
                (*item.rows, _answered_by(item.rows[0], other.rows[0], self.config.max_length)), item.index
            )
            for item, other in zip(items, [*items[1:], items[0]], strict=True)
        ]

    def _report(
        self, total: int, kept: int, same: int, cut: int, lost: int, alike: int, longest: int
    ) -> None:
        limit, truncation = self.config.max_length, self.config.truncation
        if cut and truncation == "error":
            raise DataError(
                f"{self.files_key}: {cut} of {total} pairs are longer than data.max_length={limit} "
                f"tokens; the longest has {longest}. Set data.max_length={longest}, or data.truncation=left, right "
                "or middle."
            )
        if same == total:
            raise DataError(
                f"{self.files_key}: all {total} pairs have two equal answers ('{self._keys[1]}' and '{self._keys[2]}')."
            )
        for count, meaning in (
            (same, "have two equal answers and are left out"),
            (cut, f"are cut to data.max_length={limit} tokens (data.truncation={truncation})"),
            (lost, "keep nothing of an answer when cut and are left out"),
            (alike, "have two equal answers when cut and are left out"),
        ):
            if count:
                logger.warning("%s: %d of %d pairs %s", self.files_key, count, total, meaning)
        if not kept:
            raise DataError(f"{self.files_key}: no usable pair in {total} rows.")

    def _pair(self, number: int) -> list[Row]:
        row, (prompt_key, *answer_keys) = self.rows[number], self._keys
        answers = {key: row.get(key) for key in answer_keys}
        where, reward = self.rows.origin(number), self.use == "reward"
        try:
            return pair_rows(self._chat, row.get(prompt_key), answers, where, reward)
        except DataError as error:
            raise DataError(f"{self.files_key}: {error}") from error

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        """`pad_encoded` of the pairs' rows, `chosen` [B], where known `ref_log_prob` [B], for reward models `margin`;
        `rows_together` rows make a pair."""
        items = [self.items[position] for position in positions]
        each = len(items[0].rows)
        pad: Any = self.tokenizer.pad_token_id
        tensors = pad_encoded([row for item in items for row in item.rows], pad)
        tensors["chosen"] = torch.tensor([True, False, True][:each]).repeat(len(items))
        if self.reference is not None:
            tensors["ref_log_prob"] = torch.from_numpy(self.reference[np.asarray(positions)].reshape(-1))
        if self.use == "reward":
            tensors["margin"] = torch.tensor([item.margin for item in items for _ in item.rows])
        columns: dict[str, list[Any]] = {
            "index": [item.index for item in items for _ in item.rows],
            "uid": [uid for uid in uids for _ in range(each)],
        }
        return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"rows_together": each})


def preference_loader(
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    training: bool = True,
    use: Use = "pairs",
    fit: Callable[[int], None] | None = None,
) -> Loader | None:
    """The loader of the data section's training or validation pairs (`encoded_loader`)."""
    return encoded_loader(
        config,
        lambda files: PreferenceDataset(config, files, tokenizer, training=training, use=use),
        training,
        fit,
    )


def _answered_by(mine: Encoded, other: Encoded, limit: int) -> Encoded:
    """The prompt of one row with the answer of another, cut at `limit` from the right."""
    start, answer = int(mine[1].argmax()), int(other[1].argmax())
    ids = np.concatenate([mine[0][:start], other[0][answer:]])[:limit]
    mask = np.concatenate([np.zeros(start, mine[1].dtype), other[1][answer:]])[:limit]
    return ids, mask
