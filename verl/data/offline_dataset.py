"""Rows to fine-tune on: input ids, and which of them are learned from; and the batches of all training on given answers
as people read them.

Rows are learned from where the policy itself would write; the first token never is, because nothing predicts it. All
rows are encoded at start, so that one that cannot be used is found before a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.config.schema import SFTDataConfig
from verl.data.assemble import pad_rows
from verl.data.columns import as_mapping, require_column
from verl.data.conversations import Answer, encode_answers, sft_answers
from verl.data.files import Files, Rows
from verl.data.loader import EncodedRows
from verl.data.proto import DataProto
from verl.data.tokenizer import Tokenizer, decode_all, truncate
from verl.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SFTItem:
    """One encoded row: ids, and 1 for each id that is learned from."""

    input_ids: np.ndarray
    response_mask: np.ndarray
    index: int


Encoded = tuple[np.ndarray, np.ndarray]
"""Input ids, and 1 for each id that is learned from."""


def pad_encoded(rows: Sequence[Encoded], pad_id: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `response_mask`, all [B, L], padded on the right."""
    return {
        "input_ids": pad_rows([ids for ids, _ in rows], pad_id, torch.long),
        "attention_mask": pad_rows([np.ones(len(ids), dtype=np.int64) for ids, _ in rows], 0, torch.long),
        "response_mask": pad_rows([mask for _, mask in rows], 0, torch.long),
    }


def fit_encoded(ids: list[int], mask: list[int], limit: int, truncation: str) -> Encoded:
    """Cut to `limit`; the first id is not learned from."""
    ids, mask = (truncate(values, limit, truncation) for values in (ids, mask))
    mask[0] = 0
    return np.asarray(ids, np.int32), np.asarray(mask, np.int8)


def sft_collate(items: Sequence[SFTItem], pad_id: int) -> DataProto:
    """One batch of `pad_encoded`, with the column `index`."""
    tensors = pad_encoded([(item.input_ids, item.response_mask) for item in items], pad_id)
    return DataProto.from_dict(tensors=tensors, non_tensors={"index": [item.index for item in items]})


class SFTDataset(EncodedRows[SFTItem]):
    """The rows of the data section's files: prompt and response columns, or conversations."""

    def __init__(
        self,
        config: SFTDataConfig,
        files: Files | Rows,
        tokenizer: Tokenizer,
        *,
        training: bool = True,
    ) -> None:
        super().__init__(config, files, tokenizer, training)
        self.config = config
        self._keys = {
            name: getattr(config, f"{name}_key") for name in ("messages", "prompt", "response", "tools")
        }
        self._inside = {"prompt": config.prompt_dict_keys, "response": config.response_dict_keys}
        self._conversations = self._find_columns()
        self.items = self._encode_all(self._chosen)

    def _find_columns(self) -> bool:
        """Whether the rows are conversations; refuses rows that are neither these nor prompt and response."""
        config = self.config
        if config.tools_key not in ("tools", "none"):
            require_column(self.rows, config.tools_key, "data.tools_key", "tools", self.files_key)
        if config.messages_key in self.rows.column_names:
            require_column(self.rows, config.messages_key, "data.messages_key", "prompt", self.files_key)
            if config.response_key in self.rows.column_names:
                logger.info(
                    "%s: the conversations in '%s' are used, not '%s' (data.messages_key=none would)",
                    self.files_key,
                    config.messages_key,
                    config.response_key,
                )
            return True
        require_column(self.rows, config.prompt_key, "data.prompt_key", "prompt", self.files_key)
        require_column(self.rows, config.response_key, "data.response_key", "response", self.files_key)
        return False

    def _encode_all(self, chosen: np.ndarray) -> list[SFTItem]:
        items: list[SFTItem] = []
        too_long: list[tuple[int, int]] = []
        split: list[int] = []
        nothing_left = empty = 0
        for start in range(0, len(chosen), 512):
            numbers = [int(number) for number in chosen[start : start + 512]]
            names = [self.rows.origin(number) for number in numbers]
            answers = [self._answers(self.rows[n], name) for n, name in zip(numbers, names, strict=True)]
            encoded_rows = encode_answers(self._chat, answers, names)
            split += [len(rows) for rows in encoded_rows if len(rows) > 1]
            flat = [
                (number, *row) for number, rows in zip(numbers, encoded_rows, strict=True) for row in rows
            ]
            for number, ids, mask in flat:
                empty += self._has_empty_answer(ids, mask)
                if len(ids) > self.config.max_length:
                    too_long.append((len(ids), number))
                    if self.config.truncation == "error":
                        continue
                encoded = fit_encoded(ids, mask, self.config.max_length, self.config.truncation)
                if encoded[1].any():
                    items.append(SFTItem(*encoded, number))
                else:
                    nothing_left += 1
        if split:  # the rows that each conversation with more than one became
            logger.info(
                "%s: %d of %d conversations are %d rows: the chat template or the tokenizer writes earlier messages "
                "differently once later ones follow (Qwen 3 drops their thinking), so each answer whose context "
                "changes has its own row",
                self.files_key,
                len(split),
                len(chosen),
                sum(split),
            )
        total = len(chosen) - len(split) + sum(split)
        if empty:
            learned = "of which only the end of the turn is learned"
            logger.warning(
                "%s: %d of %d rows have an empty answer, %s", self.files_key, empty, total, learned
            )
        self._report_long(too_long, nothing_left, total, len(items))
        return items

    def _has_empty_answer(self, ids: list[int], mask: list[int]) -> bool:
        """Whether an answer, a stretch of tokens that are learned, has nothing but special tokens and spaces."""
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        return any(
            not str(self.tokenizer.decode(ids[start:end], skip_special_tokens=True)).strip()
            for start, end in edges.tolist()
            if end - start <= 3
        )

    def _report_long(self, too_long: list[tuple[int, int]], nothing_left: int, total: int, left: int) -> None:
        if not too_long:
            return
        longest, number = max(too_long)
        seen = (
            f"{self.files_key}: {len(too_long)} of {total} rows are longer than data.max_length="
            f"{self.config.max_length} tokens; the longest, {self.rows.origin(number)}, has {longest}"
        )
        if self.config.truncation == "error":
            raise DataError(
                f"{seen}. Set data.max_length={longest}, or data.truncation=left, right or middle."
            )
        if not left:
            raise DataError(f"{seen}; cut at that length, no row keeps a token of its response.")
        logger.warning("%s: cut (data.truncation=%s)", seen, self.config.truncation)
        if nothing_left:
            logger.warning("%d rows are dropped: nothing of their response remained", nothing_left)

    def _answers(self, row: Mapping[str, Any], where: str) -> list[Answer]:
        try:
            keys = dict(self._keys)
            for name, inside in self._inside.items() if not self._conversations else ():
                if inside:
                    text = _inside(row, keys[name], inside, where)
                    keys[name] = ".".join((keys[name], *inside))
                    row = {**row, keys[name]: text}
            return sft_answers(self._chat, row, where, keys, conversation=self._conversations)
        except DataError as error:
            raise DataError(f"{self.files_key}: {error}") from error

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        batch = sft_collate([self.items[position] for position in positions], self.tokenizer.pad_token_id)
        return batch.union(DataProto.from_dict(non_tensors={"uid": uids}))


def _inside(row: Mapping[str, Any], column: str, names: Sequence[str], where: str) -> Any:
    """What a column has under these names, one within the other."""
    value = row.get(column)
    for name in names:
        found = as_mapping(value)
        if found is None or name not in found:
            raise DataError(f"'{column}' of {where} has no '{name}': {str(value)[:200]!r}")
        value = found[name]
    return value


def readable_rows(
    batch: DataProto, tokenizer: Any, limit: int, scores: torch.Tensor | None = None
) -> list[dict[str, Any]]:
    """At most `limit` answers of a batch: what is before the first token that is learned is the prompt, of a reward
    model's pair what both begin with. The answers of a pair have the same `uid`, the row's number in its file."""
    tensors = batch.batch
    mismatched = tensors.get("mismatched", torch.zeros(len(batch), dtype=torch.bool))
    numbers = (~mismatched).nonzero().flatten().tolist()[:limit]
    starts = tensors["response_mask"].argmax(-1)
    if "margin" in tensors:  # the last token alone is learned
        differ = tensors["input_ids"][::2] != tensors["input_ids"][1::2]
        starts = differ.byte().argmax(-1).repeat_interleave(2)
    if "step_labels" in tensors:
        starts = (tensors["step_labels"] >= 0).byte().argmax(-1)
    ids = [tensors["input_ids"][n][tensors["attention_mask"][n].bool()].tolist() for n in numbers]
    answers = decode_all(tokenizer, [row[starts[n] :] for row, n in zip(ids, numbers, strict=True)])
    rows = []
    for place, (row, n, answer) in enumerate(zip(ids, numbers, answers, strict=True)):
        side = {"answer": "chosen" if tensors["chosen"][n] else "rejected"} if "chosen" in tensors else {}
        found = {
            "uid": str(batch.non_tensor_batch["index"][n]),
            "prompt": str(tokenizer.decode(row[: starts[n]])),
            "response": answer,
            "score": None if scores is None else float(scores[place]),
            "length": len(row) - int(starts[n]),
        }
        rows.append({**found, **side})
    return rows
