"""A dataset given to a trainer in Python, as files that the loaders read, in the run folder.

The run then reads what `verl train` would: its config can be run again, and ranks on other processes find the rows. A
file is named by its content, so that a resumed run with the same rows reads the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from verl.data.files import Rows, read_rows
from verl.errors import DataError
from verl.observe.run_folder import expanded, write_atomically

Row = dict[str, Any]


class GivenData:
    """Rows in memory (a list, a dataset, an iterable), or the files, folder or dataset id that hold them."""

    def __init__(self, given: Any, name: str, *, convert: Callable[[Row], Row] | None = None) -> None:
        """`name`: what the argument is called; `convert` is applied to rows in memory."""
        self.name, self._convert = name, convert
        self.files: list[str] = []
        self._rows: Any = None
        listed = list(given) if isinstance(given, (list, tuple)) else []
        if isinstance(given, (str, Path)):
            self.files = [str(given)]
        elif listed and all(isinstance(item, (str, Path)) for item in listed):
            self.files = [str(item) for item in listed]
        elif isinstance(given, Mapping):
            raise DataError(
                f"{name} is a {type(given).__name__} of {', '.join(map(str, given))}: give one of them"
            )
        elif not hasattr(given, "__iter__"):
            raise DataError(
                f"{name} is a {type(given).__name__}; give rows (a list of dicts, a dataset of Hugging Face, an "
                "iterable) or the path of a file"
            )
        else:
            self._rows = given if hasattr(given, "__len__") else list(given)
            if not len(self._rows):
                raise DataError(f"{name} has no rows")

    def rows(self, split: str = "train") -> Rows:
        """All rows, of which files are read."""
        if self.files:
            return read_rows(self.files, key=self.name, split=split)
        return Rows.from_list(self._rows, self.name)

    @cached_property
    def first(self) -> Mapping[str, Any]:
        """The first row."""
        first = self.rows()[0] if self.files else next(iter(self._rows))
        return first if isinstance(first, Mapping) else {}

    def write(self, folder: str) -> list[str]:
        """The files to read: those given, or one written to `folder`."""
        return self.files or [str(self._written(expanded(folder).absolute() / "data"))]

    def _written(self, folder: Path) -> Path:
        lines = [self._line(number, row) for number, row in enumerate(self.rows())]
        content = "".join(lines).encode()
        path = folder / f"{self.name}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        return path

    def _line(self, number: int, row: Row) -> str:
        try:
            return json.dumps(self._convert(row) if self._convert else row, default=_plain) + "\n"
        except (TypeError, ValueError) as error:
            raise DataError(f"row {number} of {self.name} cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch, times and other iterables as JSON has them."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a value is a {type(value).__name__}")
