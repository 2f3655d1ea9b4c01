"""The data's own answers to the prompts of reinforcement learning, as the policy would write them (SPIN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl.data.chat import ChatFormat
from verl.data.columns import require_column
from verl.data.conversations import answer_ids
from verl.data.files import Rows
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
        rows = [self._rows[number] for number in numbers]
        prompts, answers = (
            [row.get(key) for row in rows] for key in (self._config.prompt_key, self._config.response_key)
        )
        for number, answer in zip(numbers, answers, strict=True):
            if answer is None or answer == "":
                raise DataError(
                    f"{self._files_key}: '{self._config.response_key}' (data.response_key) of "
                    f"{self._rows.origin(number)} must be a text, got {str(answer)[:80]!r}."
                )
        try:
            return answer_ids(self._chat, prompts, answers, [self._rows.origin(number) for number in numbers])
        except DataError as error:
            raise DataError(f"{self._files_key}: {error}") from error

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
