"""The tokens of a response as the page shows them: texts without cut characters, numbers with three digits."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import DataError

_COLUMNS = ("log_prob", "entropy", "ratio", "advantage", "mask", "age")


def whole_characters(parts: Sequence[bytes]) -> list[str]:
    """A text for each part; a character that is spread over parts is at the one that completes it. Bytes that are no
    UTF-8 become replacement characters."""
    try:
        return [part.decode() for part in parts]
    except UnicodeDecodeError:
        pass  # a character is spread over parts, or there are bytes of none
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(part) for part in parts]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


class StepTokens:
    """The tokens of the responses of one step; where there are none, `note` says why."""

    def __init__(
        self, folder: Path, step: int, wanted: Any, *, training: bool = True, left_out: bool = False
    ) -> None:
        from verl.observe.token_table import TokenFile

        self._file: TokenFile | None = None
        self.note = ""
        path = folder / f"{step}.tokens"
        if not training:
            self.note = "Tokens are recorded for training responses only."
        elif not path.is_file():
            off = wanted is False
            self.note = "Tokens were not recorded: trainer.token_data=True records them." if off else ""
            self.note = self.note or f"There is no {path.name}: runs with trainer.token_data=True write it."
        elif left_out:
            self.note = "The tokens of this step are not in the report; verl view RUN --serve shows them."
        else:
            try:
                self._file = TokenFile(path)
            except DataError as error:
                self.note = str(error)

    def row(self, line: int) -> dict[str, Any] | None:
        """Texts and numbers of the response on a line of the samples; None where there are none."""
        if self._file is None or line >= len(self._file):
            return None
        try:
            row = self._file.row(line)
        except DataError as error:
            self.note = str(error)
            return None
        return {
            "texts": whole_characters(row.texts),
            **{name: _numbers(getattr(row, name)) for name in _COLUMNS},
        }


def _numbers(values: Any) -> Any:
    """None, a number or a list of numbers, with three digits; None for NaN."""
    if values is None:
        return None
    if isinstance(values, float):
        return None if values != values else float(f"{values:.3g}")
    if values.dtype.kind in "iu":
        return values.tolist()
    # Few distinct numbers: each is formatted once.
    distinct, inverse = np.unique(values, return_inverse=True)
    short = [None if value != value else float(f"{value:.3g}") for value in distinct.tolist()]
    return [short[code] for code in inverse.tolist()]
