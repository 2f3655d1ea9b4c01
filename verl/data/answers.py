"""The data's own answers to the prompts of reinforcement learning, as the policy would write them (SPIN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.data.chat import ChatFormat
from verl.data.columns import require_column
from verl.data.files import Rows
from verl.data.segments import single_answer
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.config.schema import DataConfig


class AnswerColumn:
    """The column `data.response_key`, encoded: each answer with the token that ends it."""

    def __init__(self, config: DataConfig, rows: Rows, chat: ChatFormat, files_key: str) -> None:
        self._config, self._rows, self._chat, self._files_key = config, rows, chat, files_key
        require_column(rows, config.response_key, "data.response_key", "response", files_key)

    def ids(self, numbers: Sequence[int]) -> list[list[int]]:
        """Of these rows."""
        texts = [self._text(number) for number in numbers]
        eos: Any = self._chat.tokenizer.eos_token_id
        return [ids if eos is None or ids[-1:] == [eos] else [*ids, eos] for ids in self._chat.encode(texts)]

    def _text(self, number: int) -> str:
        key = self._config.response_key
        value = self._rows[number].get(key)
        text = single_answer(value)
        if not isinstance(text, str) or not text:
            raise DataError(
                f"{self._files_key}: '{key}' (data.response_key) of {self._rows.origin(number)} must be a text, got "
                f"{str(value)[:80]!r}."
            )
        return self._chat.answer(text, self._rows.origin(number))

    def check(self, numbers: Sequence[int]) -> None:
        """Refuse answers of these rows that are longer than a response may be."""
        limit = self._config.max_response_length
        lengths = [
            len(ids)
            for start in range(0, len(numbers), 1024)
            for ids in self.ids(numbers[start : start + 1024])
        ]
        long, longest = sum(length > limit for length in lengths), max(lengths, default=0)
        if long:
            worst = self._rows.origin(numbers[lengths.index(longest)])
            raise DataError(
                f"{self._files_key}: {long} of {len(lengths)} answers (data.response_key={self._config.response_key}) "
                f"are longer than data.max_response_length={limit} tokens; the longest, {worst}, has {longest}. Set "
                f"data.max_response_length={longest}, or leave those rows out."
            )
