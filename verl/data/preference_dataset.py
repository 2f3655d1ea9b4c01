"""Preference pairs for reward models and direct preference training: a prompt with a chosen and a rejected answer.

Both answers follow the same prompt ids. A pair is rows 2i (chosen) and 2i+1 (rejected) of a batch. Pairs with equal
answers are dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.data.chat import ChatFormat, Messages, as_messages
from verl.data.columns import require_column
from verl.data.files import Files, Rows, read_rows
from verl.data.proto import DataProto
from verl.data.segments import Segment, conversation_segments, encode_segments, pair_segments, single_answer
from verl.data.sft_dataset import Encoded, fit_encoded, pad_encoded
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferenceItem:
    """Ids and learned-from marks of both answers, each with the prompt in front."""

    chosen: Encoded
    rejected: Encoded
    index: int


def preference_collate(items: Sequence[PreferenceItem], pad_id: int) -> DataProto:
    """One batch of `pad_encoded` [2B, L], with the columns `chosen` and `index`."""
    return DataProto.from_dict(
        tensors=pad_encoded([side for item in items for side in (item.chosen, item.rejected)], pad_id),
        non_tensors={
            "chosen": [True, False] * len(items),
            "index": [item.index for item in items for _ in range(2)],
        },
    )


class PreferenceDataset:
    """Rows with `prompt`, `chosen` and `rejected`: strings or messages. Without a prompt column, the answers are
    conversations, and what they share at their beginning is the prompt."""

    def __init__(
        self,
        files: Files | Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int = 1024,
        truncation: str = "error",
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        files_key: str = "data.train_files",
    ) -> None:
        self.tokenizer = tokenizer
        self.files_key = files_key
        self._chat = ChatFormat(tokenizer, template_kwargs or {}, system_prompt=system_prompt)
        self._keys = (prompt_key, chosen_key, rejected_key)
        self._limit, self._truncation = max_length, truncation
        self.rows = files if isinstance(files, Rows) else read_rows(files, key=files_key)
        require_column(self.rows, chosen_key, "data.chosen_key", "response", files_key)
        require_column(self.rows, rejected_key, "data.rejected_key", "response", files_key)
        self.items = self._encode_all()

    def _encode_all(self) -> list[PreferenceItem]:
        items: list[PreferenceItem] = []
        same = cut = lost = longest = 0
        for start in range(0, len(self.rows), 512):
            numbers = range(start, min(start + 512, len(self.rows)))
            names = [self.rows.origin(number) for number in numbers]
            pairs = [self._pair(self.rows[number], name) for number, name in zip(numbers, names, strict=True)]
            segments = [side for pair in pairs for side in pair]
            encoded = encode_segments(self._chat, segments, [name for name in names for _ in range(2)])
            for number, chosen, rejected in zip(numbers, encoded[::2], encoded[1::2], strict=True):
                if chosen == rejected:
                    same += 1
                    continue
                length = max(len(chosen[0]), len(rejected[0]))
                if length > self._limit:
                    cut += 1
                    longest = max(longest, length)
                    if self._truncation == "error":
                        continue
                sides = [fit_encoded(*side, self._limit, self._truncation) for side in (chosen, rejected)]
                if any(not side[1].any() for side in sides):
                    lost += 1
                    continue
                items.append(PreferenceItem(sides[0], sides[1], number))
        self._report(len(items), same, cut, lost, longest)
        return items

    def _report(self, kept: int, same: int, cut: int, lost: int, longest: int) -> None:
        if cut and self._truncation == "error":
            raise DataError(
                f"{self.files_key}: {cut} of {len(self.rows)} pairs are longer than data.max_length={self._limit} "
                f"tokens; the longest has {longest}. Set data.max_length={longest}, or data.truncation=left, right "
                "or middle."
            )
        for count, meaning in (
            (same, "have two equal answers and are dropped"),
            (cut, f"are cut to data.max_length={self._limit} tokens (data.truncation={self._truncation})"),
            (lost, "keep nothing of an answer when cut and are dropped"),
        ):
            if count:
                logger.warning("%s: %d of %d pairs %s", self.files_key, count, len(self.rows), meaning)
        if not kept:
            raise DataError(f"{self.files_key}: no usable pair in {len(self.rows)} rows.")

    def _pair(self, row: Mapping[str, Any], where: str) -> tuple[list[Segment], list[Segment]]:
        prompt_key, chosen_key, rejected_key = self._keys
        prompt = row.get(prompt_key)
        answers = [row.get(chosen_key), row.get(rejected_key)]
        if prompt is None:
            prompt, answers = _shared_beginning(answers, where, prompt_key)
        sides = [
            self._side(prompt, answer, key, where)
            for answer, key in zip(answers, self._keys[1:], strict=True)
        ]
        return sides[0], sides[1]

    def _side(self, prompt: Any, answer: Any, key: str, where: str) -> list[Segment]:
        answer = single_answer(answer)
        if isinstance(answer, str):
            return pair_segments(self._chat, prompt, answer, where)
        following, before = as_messages(answer), as_messages(prompt)
        if following is None:
            raise DataError(f"{self.files_key}: '{key}' of {where} is neither a string nor messages.")
        if before is None:
            raise DataError(
                f"{self.files_key}: '{key}' of {where} is several messages, so '{self._keys[0]}' must be messages too."
            )
        return conversation_segments([*before, *following], self._chat, where, learn_from=len(before))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> PreferenceItem:
        return self.items[position]

    def row_number(self, position: int) -> int:
        return self.items[position].index

    def batch(self, positions: Sequence[int], uids: Sequence[str]) -> DataProto:
        pad: Any = self.tokenizer.pad_token_id
        batch = preference_collate([self.items[position] for position in positions], pad)
        return batch.union(DataProto.from_dict(non_tensors={"uid": [uid for uid in uids for _ in range(2)]}))


def _shared_beginning(answers: Sequence[Any], where: str, prompt_key: str) -> tuple[Messages, list[Any]]:
    """The messages two conversations both start with, and those that follow in each."""
    chosen, rejected = (as_messages(answer) for answer in answers)
    if chosen is None or rejected is None:
        raise DataError(
            f"{where} has no '{prompt_key}' (data.prompt_key), and its answers are not conversations either."
        )
    shared = 0
    # At least the last message of each is the answer itself, also when the answers are equal.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise DataError(f"The two conversations of {where} do not start with the same message.")
    return chosen[:shared], [chosen[shared:], rejected[shared:]]
