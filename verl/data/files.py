"""Rows of parquet, json, jsonl, csv, tsv or arrow files, of folders and lists of them, or of a dataset of the hub.

Rows keep the order of the files (a folder's sorted by path) and know their origin, so that errors can name it. Tables
stay columnar in memory and are decoded row by row.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.data.readers import KNOWN, ending, is_data_file, looks_like, read_file
from verl.errors import DataError, missing_package

logger = logging.getLogger(__name__)

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class _Part:
    """The rows of one file: a pyarrow table, or a list of dictionaries."""

    name: str
    rows: Any
    columns: tuple[str, ...]
    fingerprint: str | None

    def __len__(self) -> int:
        return int(self.rows.num_rows) if hasattr(self.rows, "num_rows") else len(self.rows)

    def row(self, i: int) -> dict[str, Any]:
        if hasattr(self.rows, "num_rows"):
            return self.rows.slice(i, 1).to_pylist()[0]
        return dict(self.rows[i])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if hasattr(self.rows, "num_rows"):
            for batch in self.rows.to_batches(max_chunksize=1024):
                yield from batch.to_pylist()
        else:
            yield from map(dict, self.rows)


class Rows(Sequence[dict[str, Any]]):
    """Rows of one or several files, by number, as dictionaries."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = list(parts)
        self._starts: list[int] = []
        total = 0
        for part in self._parts:
            self._starts.append(total)
            total += len(part)
        self._total = total

    @staticmethod
    def from_list(rows: Iterable[Mapping[str, Any]], name: str = "the given rows") -> Rows:
        """Rows that are already in memory."""
        held = list(rows)
        for number, row in enumerate(held):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"Row {number} of {name} is a {type(row).__name__}; rows must be dictionaries."
                )
        return Rows([_Part(name, held, _columns_of(held), None)])

    @staticmethod
    def joined(several: Iterable[Rows]) -> Rows:
        """All rows of all, in order."""
        return Rows([part for rows in several for part in rows._parts])

    @property
    def column_names(self) -> list[str]:
        """Every column any row has, in order of first appearance."""
        return list(dict.fromkeys(name for part in self._parts for name in part.columns))

    def files(self) -> list[tuple[str, list[str], int]]:
        """Each file's name, columns and number of rows, in order."""
        return [(part.name, list(part.columns), len(part)) for part in self._parts]

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts]

    @property
    def stem(self) -> str:
        """A short name: the first file's, without folder and ending."""
        return Path(self._parts[0].name.split(":")[0]).stem

    def __len__(self) -> int:
        return self._total

    def _locate(self, row: int) -> tuple[int, int]:
        if not -self._total <= row < self._total:
            raise IndexError(f"row {row} does not exist: there are {self._total}")
        row %= self._total
        part = bisect.bisect_right(self._starts, row) - 1
        return part, row - self._starts[part]

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._total))]
        part, inside = self._locate(int(row))
        return self._parts[part].row(inside)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part

    def column(self, name: str) -> Iterator[Any]:
        """One column of every row, None where a row has no such column; quicker than whole rows."""
        for part in self._parts:
            if name not in part.columns:
                yield from (None for _ in range(len(part)))
            elif hasattr(part.rows, "num_rows"):
                for chunk in part.rows.column(name).chunks:
                    yield from chunk.to_pylist()
            else:
                yield from (row.get(name) for row in part.rows)

    def table(self, numbers: Sequence[int]) -> Any:
        """Some of the rows as one pyarrow table; columns of table files keep their types."""
        import pyarrow as pa

        parts = [
            part.rows if isinstance(part.rows, pa.Table) else pa.Table.from_pylist(part.rows)
            for part in self._parts
        ]
        whole = parts[0] if len(parts) == 1 else pa.concat_tables(parts, promote_options="permissive")
        if list(numbers) == list(range(len(numbers))):
            return whole.slice(0, len(numbers))
        return whole.take(pa.array(list(numbers), type=pa.int64()))

    def origin(self, row: int) -> str:
        """Where a row came from, for messages; rows are counted from 0."""
        part, inside = self._locate(row)
        return f"row {inside} of {self._parts[part].name}"

    def fingerprint(self) -> str | None:
        """Changes when a file changes; None for rows that came from no file."""
        prints = [part.fingerprint for part in self._parts]
        if not prints or any(mark is None for mark in prints):
            return None
        return hashlib.sha256("\n".join(map(str, prints)).encode()).hexdigest()


def _columns_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(name) for row in rows for name in row))


_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+){0,2}$")


def _read_file(path: Path, key: str) -> _Part:
    import pyarrow as pa

    try:
        rows = read_file(path)
        stat = path.stat()
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
    columns = tuple(rows.column_names) if isinstance(rows, pa.Table) else _columns_of(rows)
    part = _Part(str(path), rows, columns, f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    if not len(part):
        logger.warning("%s: %s has no rows", key, path)
    return part


def _inside(folder: Path, key: str) -> list[Path]:
    """The data files of a folder, sorted; a dataset saved by `datasets` keeps json beside its arrow files."""
    found = sorted(
        path
        for path in folder.rglob("*")
        if is_data_file(path)
        and path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    )
    if any(path.suffix == ".arrow" for path in found) and any(
        path.name == "dataset_info.json" for path in found
    ):
        found = [path for path in found if path.suffix == ".arrow"]
    if not found:
        raise DataError(f"{key}: the folder {folder} holds no data file ({KNOWN}).")
    return found


def _from_hub(name: str, split: str, key: str) -> _Part:
    """`owner/name`, `owner/name:split` or `owner/name:config:split`."""
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
    return _Part(name, table, tuple(table.column_names), f"hub {name} {split} {dataset._fingerprint}")


def _expand(entry: str | Path, split: str, key: str) -> list[_Part]:
    text = str(entry)
    path = Path(text).expanduser()
    if path.is_dir():
        return [_read_file(inner, key) for inner in _inside(path, key)]
    if path.exists():
        if not path.is_file():
            raise DataError(f"{key}: {path} is neither a regular file nor a folder.")
        if not is_data_file(path):
            raise DataError(
                f"{key}: {path} has the unknown ending '{path.suffix}'; known: {KNOWN}.{looks_like(path)}"
            )
        return [_read_file(path, key)]
    if glob.has_magic(text):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise DataError(f"{key}: no file matches {path}.")
        return [part for match in matches for part in _expand(match, split, key)]
    if not is_data_file(path) and _HUB_ID.match(text):
        return [_from_hub(text, split, key)]
    raise DataError(_not_found(path, key))


def absent(entry: str | Path, key: str) -> str | None:
    """Why an entry of `key` that can only mean something on this machine is not there; None where it may be."""
    path = Path(str(entry)).expanduser()
    local = is_data_file(path) or str(entry).startswith(("/", ".", "~"))
    return _not_found(path, key) if local and not path.exists() and not glob.has_magic(str(entry)) else None


def _not_found(path: Path, key: str) -> str:
    if path.is_symlink():
        return f"{key}: {path} is a link to {path.readlink()}, which does not exist."
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if parent != path.parent:
        return f"{key}: {path} does not exist (nor does its folder; the nearest that does is {parent})."
    shown = [p for p in parent.iterdir() if not p.name.startswith(".") and (is_data_file(p) or p.is_dir())]
    beside = [p.name for p in sorted(shown, key=lambda p: (p.is_dir(), p.name))][:8]
    return f"{key}: {path} does not exist. The folder {parent.resolve()} holds: {', '.join(beside) or 'no data files'}."


def read_rows(files: Files, *, key: str = "data.train_files", split: str = "train") -> Rows:
    """All rows of `files`; `key` is the setting named in errors, `split` the part of a hub dataset without one."""
    entries = [files] if isinstance(files, str | Path) else list(files or ())
    if not entries or any(not str(entry).strip() for entry in entries):
        raise DataError(f"{key} is empty: give a file, a folder, a list of them ({KNOWN}) or a dataset id.")
    rows = Rows([part for entry in entries for part in _expand(entry, split, key)])
    if not len(rows):
        raise DataError(f"{key}: {', '.join(rows.names)} has no rows.")
    return rows
