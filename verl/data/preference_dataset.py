"""Judged answers, for preference training and reward models: pairs of a chosen and a rejected answer, single answers
with a label, and those with a label for each step.

A pair is two consecutive rows of a batch, chosen and rejected. A labelled answer is followed by this prompt with the
answer to another one, from which KTO estimates its KL: always the same other answer, so that the reference's log-prob
of it is computed once, too. Pairs with equal answers, also those that are equal once they are cut, are dropped and
counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from verl.config.schema import OfflineConfig, PreferenceConfig, RewardTrainingConfig
from verl.data.assemble import pad_rows
from verl.data.columns import as_number, require_column
from verl.data.conversations import Row, labelled_row, pair_rows, step_row
from verl.data.files import Files, Rows
from verl.data.loader import EncodedRows
from verl.data.offline_dataset import Encoded, SFTDataset, fit_encoded, pad_encoded
from verl.data.proto import DataProto
from verl.data.tokenizer import Tokenizer, truncate
from verl.errors import DataError

logger = logging.getLogger(__name__)

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""As files of any format write them."""


def dataset_of(config: OfflineConfig) -> type[SFTDataset] | type[PreferenceDataset]:
    """The dataset of a command that trains on given answers."""
    if not isinstance(config, PreferenceConfig):
        return SFTDataset
    if isinstance(config, RewardTrainingConfig):
        return RewardDataset if config.pairs else StepDataset
    return PreferenceDataset if config.pairs else LabelledDataset


@dataclass(frozen=True)
class PreferenceItem:
    """Rows that stay together, each with the prompt in front: chosen and rejected, or an answer and its prompt with
    another answer."""

    rows: tuple[Encoded, ...]
    index: int
    margin: float = 0.0
    label: bool = True
    """Of a single answer: whether it is desirable."""
    step_labels: np.ndarray | None = None
    """Of an answer whose steps are judged: for each id the label of its step, -1 for those of the prompt."""


class PreferenceDataset(EncodedRows[PreferenceItem]):
    """Rows with `prompt`, `chosen` and `rejected`: strings or messages. Without a prompt column, the answers are
    conversations, and what they share at their beginning is the prompt."""

    of_reward_models: ClassVar[bool] = False

    def __init__(
        self, config: Any, files: Files | Rows, tokenizer: Tokenizer, *, training: bool = True
    ) -> None:
        super().__init__(config, files, tokenizer, training)
        self.config = config
        self.reference: np.ndarray | None = None
        """[items, rows of each]: the reference's log-probs of the answers, once they are known."""
        self.items = self._encode_all(map(int, self._chosen))

    def _encode_all(self, numbers: Iterable[int]) -> list[PreferenceItem]:
        keys = (self.config.chosen_key, self.config.rejected_key)
        for key, name in zip(keys, ("chosen_key", "rejected_key"), strict=True):
            require_column(self.rows, key, f"data.{name}", "response", self.files_key)
        items: list[PreferenceItem] = []
        seen: Counter[str] = Counter()
        for number in numbers:
            seen["all"] += 1
            sides = self._pair(number)
            if sides[0] == sides[1]:
                seen["have two equal answers and are left out"] += 1
            elif fitted := self._fitted(sides, seen):
                if np.array_equal(fitted[0], fitted[1]):
                    seen["have two equal answers when cut and are left out"] += 1
                else:
                    items.append(PreferenceItem(fitted, number, self._margin(number)))
        if seen["have two equal answers and are left out"] == seen["all"]:
            raise DataError(
                f"{self.files_key}: all {seen['all']} pairs have two equal answers ('{keys[0]}' and '{keys[1]}')."
            )
        self._report(seen, len(items), "pair")
        return items

    def _pair(self, number: int) -> list[Row]:
        row, config = self.rows[number], self.config
        answers = {key: row.get(key) for key in (config.chosen_key, config.rejected_key)}
        prompt, where = row.get(config.prompt_key), self.rows.origin(number)
        try:
            return pair_rows(self._chat, prompt, answers, where, self.of_reward_models)
        except DataError as error:
            raise DataError(f"{self.files_key}: {error}") from error

    def _fitted(self, rows: Sequence[Row], seen: Counter[str]) -> tuple[Encoded, ...]:
        """Cut to data.max_length; () where they are refused, or nothing of an answer is left. Counts what it does."""
        longest = max(len(ids) for ids, _ in rows)
        if longest > self.config.max_length:
            seen["cut"] += 1
            seen["longest"] = max(seen["longest"], longest)
            if self.config.truncation == "error":
                return ()
        fitted = tuple(self._fit(*row) for row in rows)
        if all(mask.any() for _, mask in fitted):
            return fitted
        seen["keep nothing of an answer when cut and are left out"] += 1
        return ()

    def _fit(self, ids: list[int], mask: list[int]) -> Encoded:
        return fit_encoded(ids, mask, self.config.max_length, self.config.truncation)

    def _margin(self, number: int) -> float:
        return 0.0

    def _report(self, seen: Counter[str], kept: int, what: str) -> None:
        """Log what was cut or left out; raise where rows must not be cut, or none is left."""
        limit, truncation = self.config.max_length, self.config.truncation
        total, cut, longest = (seen.pop(name, 0) for name in ("all", "cut", "longest"))
        if cut and truncation == "error":
            raise DataError(
                f"{self.files_key}: {cut} of {total} {what}s are longer than data.max_length={limit} "
                f"tokens; the longest has {longest}. Set data.max_length={longest}, or data.truncation=left, right "
                "or middle."
            )
        seen[f"are cut to data.max_length={limit} tokens (data.truncation={truncation})"] = cut
        for meaning, count in seen.items():
            if count:
                logger.warning("%s: %d of %d %ss %s", self.files_key, count, total, what, meaning)
        if not kept:
            raise DataError(f"{self.files_key}: no usable {what} in {total} rows.")

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        """`pad_encoded` of the items' rows, what is known of each (`_judged`), and `ref_log_prob` [B] once it is known;
        `rows_together` rows make an item."""
        items = [self.items[position] for position in positions]
        each = len(items[0].rows)
        pad: Any = self.tokenizer.pad_token_id
        tensors = pad_encoded([row for item in items for row in item.rows], pad) | self._judged(items)
        if self.reference is not None:
            tensors["ref_log_prob"] = torch.from_numpy(self.reference[np.asarray(positions)].reshape(-1))
        columns: dict[str, list[Any]] = {
            "index": [item.index for item in items for _ in item.rows],
            "uid": [uid for uid in uids for _ in range(each)],
        }
        return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"rows_together": each})

    def _judged(self, items: Sequence[PreferenceItem]) -> dict[str, torch.Tensor]:
        """`chosen` [B]; for reward models `margin` [B]."""
        return {"chosen": torch.tensor([True, False] * len(items))}


class RewardDataset(PreferenceDataset):
    """Pairs for a reward model: whole conversations, with how much better the chosen answer is."""

    of_reward_models = True

    def _cut(self, values: list[Any]) -> list[Any]:
        """To data.max_length, of which the last is kept: that of the token that asks for the reward."""
        return [*truncate(values[:-1], self.config.max_length - 1, self.config.truncation), values[-1]]

    def _fit(self, ids: list[int], mask: list[int]) -> Encoded:
        """The token that asks for the reward stays, wherever the conversation is cut."""
        ids = self._cut(ids)
        return fit_encoded(ids, mask[len(mask) - len(ids) :], len(ids), "error")

    def _margin(self, number: int) -> float:
        name = getattr(self.config, "margin_key", None)
        value = self.rows[number].get(name) if name in self.rows.column_names else None
        if value is None or value == "":  # which an empty cell of a CSV file is
            return 0.0
        margin = as_number(value)
        if isinstance(value, bool) or not np.isfinite(margin):
            raise DataError(
                f"{self.files_key}: '{name}' (data.margin_key) of {self.rows.origin(number)} is {value!r}; it must be "
                "a finite number."
            )
        return margin

    def _judged(self, items: Sequence[PreferenceItem]) -> dict[str, torch.Tensor]:
        margins = torch.tensor([item.margin for item in items for _ in item.rows])
        return {**super()._judged(items), "margin": margins}


class LabelledDataset(PreferenceDataset):
    """Rows with `prompt`, `completion` and `label`, whether the completion is desirable; or pairs, of which each is two
    labelled answers."""

    def _encode_all(self, numbers: Iterable[int]) -> list[PreferenceItem]:
        config, names = self.config, set(self.rows.column_names)
        if {config.chosen_key, config.rejected_key} <= names and config.completion_key not in names:
            items = [
                replace(pair, rows=(side,), label=label)
                for pair in super()._encode_all(numbers)
                for side, label in zip(pair.rows, (True, False), strict=True)
            ]
            return self._with_others(items)
        require_column(self.rows, config.prompt_key, "data.prompt_key", "prompt", self.files_key)
        require_column(self.rows, config.completion_key, "data.completion_key", "response", self.files_key)
        require_column(self.rows, config.label_key, "data.label_key", "label", self.files_key)
        items = []
        seen: Counter[str] = Counter()
        for number in numbers:
            seen["all"] += 1
            if fitted := self._fitted([self._answer(number)], seen):
                items.append(PreferenceItem(fitted, number, label=self._label(number)))
        self._report(seen, len(items), "answer")
        return self._with_others(items)

    def _answer(self, number: int) -> Row:
        row, key = self.rows[number], self.config.completion_key
        prompt, where = row.get(self.config.prompt_key), self.rows.origin(number)
        try:
            return labelled_row(self._chat, prompt, row.get(key), where, key)
        except DataError as error:
            raise DataError(f"{self.files_key}: {error}") from error

    def _label(self, number: int) -> bool:
        name = self.config.label_key
        value = self.rows[number].get(name)
        label = _LABELS.get(str(value).strip().lower())
        if label is None:
            raise DataError(
                f"{self.files_key}: '{name}' (data.label_key) of {self.rows.origin(number)} is {value!r}; it must be "
                "true or false."
            )
        return label

    def _with_others(self, items: list[PreferenceItem]) -> list[PreferenceItem]:
        """Each with a second row: its prompt with an answer to the next other prompt."""
        answers: dict[bytes, list[int]] = {}
        for position, item in enumerate(items):
            ids, mask = item.rows[0]
            answers.setdefault(ids[: mask.argmax()].tobytes(), []).append(position)
        if len(answers) < 2:
            raise DataError(
                f"{self.files_key}: all answers are to one prompt; algorithm.loss=kto estimates its KL from "
                "answers to other prompts, so it needs at least 2 prompts."
            )
        of_prompts = list(answers.values())
        for own, others in zip(of_prompts, [*of_prompts[1:], of_prompts[0]], strict=True):
            for turn, position in enumerate(own):
                mine, other = items[position].rows[0], items[others[turn % len(others)]].rows[0]
                mismatched = _answered_by(mine, other, self.config.max_length)
                items[position] = replace(items[position], rows=(mine, mismatched))
        return items

    def _judged(self, items: Sequence[PreferenceItem]) -> dict[str, torch.Tensor]:
        """`chosen` [B], whether an answer is desirable, and `mismatched` [B], whether it is to another prompt."""
        return {
            "chosen": torch.tensor([item.label for item in items for _ in item.rows]),
            "mismatched": torch.tensor([False, True] * len(items)),
        }


class StepDataset(RewardDataset):
    """Rows with `prompt`, `completions`, the steps of an answer, and `labels`, how right each is. What is learned from
    is the value of the last token of each step, whose separator is part of it: the mask is 1 for the token behind it,
    and so one more token ends a row."""

    def _encode_all(self, numbers: Iterable[int]) -> list[PreferenceItem]:
        for name, role in (
            ("prompt_key", "prompt"),
            ("completions_key", "response"),
            ("labels_key", "label"),
        ):
            require_column(self.rows, getattr(self.config, name), f"data.{name}", role, self.files_key)
        items: list[PreferenceItem] = []
        seen: Counter[str] = Counter()
        for number in numbers:
            seen["all"] += 1
            row, labels = self._steps(number)
            if fitted := self._fitted([row], seen):
                items.append(
                    PreferenceItem(fitted, number, step_labels=np.asarray(self._cut(labels), np.float32))
                )
        self._report(seen, len(items), "answer")
        return items

    def _steps(self, number: int) -> tuple[Row, list[float]]:
        row, where, config = self.rows[number], self.rows.origin(number), self.config
        steps, given = row.get(config.completions_key), row.get(config.labels_key)
        if not isinstance(steps, (list, tuple)) or not steps or not all(isinstance(x, str) for x in steps):
            raise DataError(
                f"{self.files_key}: '{config.completions_key}' (data.completions_key) of {where} must be a list of "
                f"texts, one for each step, not {str(steps)[:80]!r}."
            )
        labels = [as_number(label) for label in given] if isinstance(given, (list, tuple)) else []
        if len(labels) != len(steps) or not all(0 <= label <= 1 for label in labels):
            raise DataError(
                f"{self.files_key}: '{config.labels_key}' (data.labels_key) of {where} must be a list of true or "
                f"false, or numbers from 0 to 1, one for each of its {len(steps)} steps, not {str(given)[:80]!r}."
            )
        try:
            chat, prompt = self._chat.of_reward_models, row.get(config.prompt_key)
            ids, lengths = step_row(chat, prompt, steps, config.step_separator, where)
        except DataError as error:
            raise DataError(f"{self.files_key}: {error}") from error
        if 0 in lengths[1:]:
            raise DataError(
                f"{self.files_key}: step {lengths.index(0, 1)} of {where} has no tokens; leave it out."
            )
        end: Any = self.tokenizer.pad_token_id
        ends = np.zeros(len(ids) + 1, np.int8)
        ends[np.cumsum(lengths)[1:] - 1] = 1
        of_ids = np.repeat([-1.0, *labels], lengths).tolist()
        return ([*ids, end], ends.tolist()), [*of_ids, labels[-1]]

    def _fit(self, ids: list[int], ends: list[int]) -> Encoded:
        """Cut; `ends` are 1 for the last token of a step, the mask for the one behind it."""
        mask = [0, *self._cut(ends)[:-1]]
        return np.asarray(self._cut(ids), np.int32), np.asarray(mask, np.int8)

    def _judged(self, items: Sequence[PreferenceItem]) -> dict[str, torch.Tensor]:
        """`step_labels` [B, L]: of each id, -1 in prompts."""
        return {"step_labels": pad_rows([np.asarray(item.step_labels) for item in items], -1, torch.float32)}


def _answered_by(mine: Encoded, other: Encoded, limit: int) -> Encoded:
    """The prompt of one row with the answer of another, cut at `limit` from the right."""
    start, answer = int(mine[1].argmax()), int(other[1].argmax())
    ids = np.concatenate([mine[0][:start], other[0][answer:]])[:limit]
    mask = np.concatenate([np.zeros(start, mine[1].dtype), other[1][answer:]])[:limit]
    return ids, mask
