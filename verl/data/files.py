"""Rows of parquet, json, jsonl, csv, tsv or arrow files, of folders and lists of them, or of a dataset of the hub.

Rows keep the order of the files (a folder's sorted by path) and know their origin, so that errors can name it. Of a
folder with several splits only the files of one are read. Tables stay columnar in memory and are decoded row by row.
json and csv are taken literally (csv values stay strings), because pyarrow's readers infer one type per column and
refuse rows that differ. Text may be gzipped.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import hashlib
import itertools
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from verl.config.sections.rollout import VERIFIERS
from verl.data.file_search import KNOWN, ending, expand, looks_like
from verl.data.messages import is_conversation
from verl.data.special_tokens import require_characters
from verl.errors import DataError, missing_package
from verl.json_input import parse_json

logger = logging.getLogger(__name__)

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class _File:
    """The rows of one file: a pyarrow table, or a list of dictionaries."""

    name: str
    rows: Any
    columns: tuple[str, ...]
    fingerprint: str | None

    @property
    def is_table(self) -> bool:
        return hasattr(self.rows, "num_rows")

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        return self.rows.slice(i, 1).to_pylist()[0] if self.is_table else dict(self.rows[i])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.is_table:
            yield from map(dict, self.rows)
            return
        for batch in self.rows.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def column(self, name: str) -> Iterator[Any]:
        if not self.is_table:
            yield from (row.get(name) for row in self.rows)
        elif name not in self.columns:
            yield from itertools.repeat(None, len(self))
        else:
            for chunk in self.rows.column(name).chunks:
                yield from chunk.to_pylist()


class Rows(Sequence[dict[str, Any]]):
    """Rows of one or several files, by number, as dictionaries."""

    read_late = False
    """Whether a row may be read only when it is drawn."""

    def __init__(self, files: Sequence[_File]) -> None:
        self._files = list(files)
        *self._starts, self._total = itertools.accumulate(map(len, self._files), initial=0)

    @staticmethod
    def from_list(rows: Iterable[Mapping[str, Any]], name: str = "the given rows") -> Rows:
        """Rows that are already in memory."""
        listed = list(rows)
        for number, row in enumerate(listed):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"Row {number} of {name} is a {type(row).__name__}; rows must be dictionaries."
                )
            _require_characters(row, f"row {number} of {name}")
        return Rows([_File(name, listed, _columns_of(listed), None)])

    @staticmethod
    def joined(several: Iterable[Rows]) -> Rows:
        """All rows of all, in order."""
        return Rows([file for rows in several for file in rows._files])

    @property
    def column_names(self) -> list[str]:
        """Every column any row has, in order of first appearance."""
        return list(dict.fromkeys(name for file in self._files for name in file.columns))

    def files(self) -> list[tuple[str, list[str], int]]:
        """Each file's name, columns and number of rows, in order."""
        return [(file.name, list(file.columns), len(file)) for file in self._files]

    @property
    def names(self) -> list[str]:
        return [file.name for file in self._files]

    @property
    def stem(self) -> str:
        """A short name: the first file's, without folder and ending."""
        return Path(self._files[0].name.split(":")[0]).stem

    def __len__(self) -> int:
        return self._total

    def _locate(self, row: int) -> tuple[_File, int]:
        if not -self._total <= row < self._total:
            raise IndexError(f"row {row} does not exist: there are {self._total}")
        row %= self._total
        number = bisect.bisect_right(self._starts, row) - 1
        return self._files[number], row - self._starts[number]

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._total))]
        file, inside = self._locate(int(row))
        return file.row(inside)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(self._files)

    def column(self, name: str) -> Iterator[Any]:
        """One column of every row, None where a row has no such column; quicker than full rows."""
        return itertools.chain.from_iterable(file.column(name) for file in self._files)

    def table(self, numbers: Sequence[int]) -> Any:
        """Some of the rows as one pyarrow table; columns of table files keep their types."""
        import pyarrow as pa

        tables = [file.rows if file.is_table else table_of(file.rows) for file in self._files]
        joined = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
        if list(numbers) == list(range(len(numbers))):
            return joined.slice(0, len(numbers))
        return joined.take(pa.array(list(numbers), type=pa.int64()))

    def origin(self, row: int) -> str:
        """Where a row came from, for messages; rows are counted from 0."""
        file, inside = self._locate(row)
        return f"row {inside} of {file.name}"

    def fingerprint(self) -> str | None:
        """Changes when a file changes; None for rows that came from no file."""
        marks = [file.fingerprint for file in self._files]
        if not marks or None in marks:
            return None
        return hashlib.sha256("\n".join(map(str, marks)).encode()).hexdigest()


def _columns_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(name) for row in rows for name in row))


def table_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pyarrow table with every column that any row has; `Table.from_pylist` takes those of the first row only."""
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({str(name): [row.get(name) for row in rows] for name in names})


def read_rows(files: Files, *, key: str = "data.train_files", split: str = "train") -> Rows:
    """All rows of `files`; `key` is the setting named in errors, `split` the one that is read of a folder with several
    and of a hub dataset given without: train or test."""
    entries = [files] if isinstance(files, str | Path) else list(files or ())
    if not entries or any(not str(entry).strip() for entry in entries):
        raise DataError(f"{key} is empty: give a file, a folder, a list of them ({KNOWN}) or a dataset id.")
    found: list[Path | str] = []
    for entry in entries:
        found += [entry] if str(entry).startswith(VERIFIERS) else expand(entry, split, key)
    rows = Rows(
        [_read(file, key) if isinstance(file, Path) else _from_hub(file, split, key) for file in found]
    )
    if not len(rows):
        raise DataError(f"{key}: {', '.join(rows.names)} has no rows.")
    return rows


# -- reading --------------------------------------------------------------------------------------------------------


def _from_hub(name: str, split: str, key: str) -> _File:
    """`owner/name`, `owner/name:split` or `owner/name:config:split`; or the data of an environment."""
    if name.startswith(VERIFIERS):
        from verl.data.verifiers import verifiers_dataset

        table = verifiers_dataset(name, split, key).with_format("arrow")[:]
        return _File(name, table, tuple(table.column_names), None)
    try:
        import datasets
    except ImportError as error:
        cause = missing_package(
            "datasets", "datasets", f"{key}={name} (no file or folder of that name, so a dataset id)"
        )
        raise cause from error
    dataset_id, *rest = name.split(":")
    config = rest[0] if len(rest) == 2 else None
    split = rest[-1] if rest else split
    try:
        dataset = datasets.load_dataset(dataset_id, config, split=split)
        table = dataset.with_format("arrow")[:]
    except Exception as error:  # the hub client raises dozens of kinds; all mean the same to the user
        raise DataError(
            f"{key}: '{name}' is no file, and as a dataset id it cannot be loaded (config {config or 'default'}, split "
            f"{split}; choose by owner/name:config:split): {type(error).__name__}: {str(error).rstrip('.')}."
        ) from error
    return _File(name, table, tuple(table.column_names), f"hub {name} {split} {dataset._fingerprint}")


def _read(path: Path, key: str) -> _File:
    import pyarrow as pa

    try:
        rows = _READERS[ending(path)](path)
        stat = path.stat()
        is_table = isinstance(rows, pa.Table)
        if is_table:
            _require_distinct(rows.column_names, path)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    except PermissionError as error:
        raise DataError(f"{key}: {path} cannot be read: no permission.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {path} is not UTF-8 text: {error}.{looks_like(path)}") from error
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        why = str(error).rstrip(".")
        raise DataError(
            f"{key}: {path} cannot be read as {ending(path)[1:]}: {why}.{looks_like(path)}"
        ) from error
    columns = tuple(rows.column_names) if is_table else _columns_of(rows)
    if not len(rows):
        logger.warning("%s: %s has no rows", key, path)
    return _File(str(path), rows, columns, f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")


def _open(path: Path, newline: str | None = None) -> TextIO:
    """UTF-8 with or without a byte order mark, uncompressed on the way."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _checked(row: Any, where: str, text: str) -> dict[str, Any]:
    """`text`: the JSON that the row is of."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object of columns, got {type(row).__name__}.")
    if _SURROGATE.search(text):
        _require_characters(row, where)
    return row


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""One half of a pair; most are followed by the other."""


def _require_characters(row: Mapping[str, Any], where: str) -> None:
    """In every column: other columns are written to the outputs of a run."""
    for name, value in row.items():
        require_characters([name, value], f"'{name}' of {where}")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            hint = looks_like(path) if number == 1 else ""
            row = _parsed(line, f"{path}, line {number}", f" Each line must be one object.{hint}")
            rows.append(_checked(row, f"{path}, line {number}", line))
    return rows


def _parsed(text: str, where: str, hint: str = "") -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON: {error}.{hint}") from error
    except ValueError as error:  # nested too deeply, a number of too many digits
        raise DataError(f"{where} cannot be used: {error}.") from error


def _read_json(path: Path) -> list[dict[str, Any]]:
    with _open(path) as file:
        text = file.read()
    try:
        content = _parsed(text, str(path))
    except DataError as error:
        if "Extra data" in str(error):  # one object per line under the name .json is common
            return _read_jsonl(path)
        raise
    if isinstance(content, dict):
        # {"data": [...]} and the like: the one list of objects is the data, unless it is the row's conversation.
        lists = [value for value in content.values() if isinstance(value, list)]
        is_data = len(lists) == 1 and lists[0] and all(isinstance(value, dict) for value in lists[0])
        content = lists[0] if is_data and not _is_one_conversation(lists[0]) else [content]
    elif isinstance(content, list) and _is_one_conversation(content):
        content = [{"messages": content}]
    if not isinstance(content, list):
        raise DataError(f"{path} must hold a list of objects, got {type(content).__name__}.")
    return [_checked(row, f"{path}, element {number}", text) for number, row in enumerate(content)]


def _is_one_conversation(values: list[Any]) -> bool:
    """Whether all are messages, so that the file holds one row."""
    return bool(values) and all(
        isinstance(value, dict) and (is_conversation(value) or {"from", "value"} <= value.keys())
        for value in values
    )


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ending(path) == ".tsv" else ","
    with _open(path, newline="") as lines:
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        rows = []
        try:
            _require_distinct(reader.fieldnames or (), path)
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num}: the number of fields differs from the header's "
                        f"{len(reader.fieldnames or ())}; quote fields that contain '{delimiter}' or newlines."
                    )
                rows.append(dict(row))
        except csv.Error as error:
            raise DataError(f"{path} is not valid csv after line {reader.line_num}: {error}.") from error
    return rows


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).read()


def _read_arrow(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_file(source).read_all()


def _require_distinct(columns: Sequence[str], path: Path) -> None:
    name, count = next(iter(Counter(columns).most_common(1)), ("", 0))
    if count > 1:
        raise DataError(
            f"{path} has the column '{name}' {count} times; rename or drop all but one. Its columns: "
            f"{', '.join(columns)}."
        )


_READERS: dict[str, Callable[[Path], Any]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".arrow": _read_arrow,
}
