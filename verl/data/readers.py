"""One reader for each kind of file: from a path to a table or a list of rows.

json and csv are taken literally (csv values stay strings), because pyarrow's readers infer one type per column and
refuse rows that differ. Text may be gzipped. Errors name the file, the line, and what the file looks like instead.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from verl.errors import DataError
from verl.json_input import parse_json

_BEGINNINGS = (
    (b"version https://git-lfs", (), "a Git LFS pointer, not the data: fetch it with `git lfs pull`"),
    (b"PAR1", (".parquet",), "a parquet file: give it the ending .parquet"),
    (b"ARROW1", (".arrow",), "an arrow file: give it the ending .arrow"),
    (b"\x1f\x8b", (".gz",), "a file compressed by gzip: give it the ending .gz, e.g. .jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", (), "a file compressed by zstd: uncompress it first"),
    (b"PK\x03\x04", (), "a zip archive: unpack it first"),
    (b"\xff\xfe", (), "UTF-16 text: save it as UTF-8, e.g. iconv -f utf-16 -t utf-8"),
    (b"\xfe\xff", (), "UTF-16 text: save it as UTF-8, e.g. iconv -f utf-16 -t utf-8"),
    (b"<", (), "a page of HTML or XML, not the data: look at what was downloaded"),
    (b"{", (".jsonl", ".json"), "JSON: give it the ending .jsonl"),
    (b"[", (".json",), "one list of JSON: give it the ending .json"),
)
"""First bytes of a file, the endings that fit, and what it is."""


def looks_like(path: Path) -> str:
    """What a misnamed file holds, by its first bytes; empty where they say nothing new."""
    try:
        with path.open("rb") as file:
            first = file.read(64)
    except OSError:
        return ""
    for beginning, endings, what in _BEGINNINGS:
        if first.startswith(beginning) or first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(beginning):
            return "" if path.suffix.lower() in endings else f" It looks like {what}."
    return ""


def _open(path: Path, newline: str | None = None) -> TextIO:
    """UTF-8 with or without a byte order mark, uncompressed on the way."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _objects(values: Any, name: str, unit: str, numbers: Iterable[int] | None = None) -> list[dict[str, Any]]:
    for number, value in zip(numbers or range(len(values)), values, strict=True):
        if not isinstance(value, dict):
            raise DataError(
                f"{name}, {unit} {number}: expected an object of columns, got {type(value).__name__}."
            )
    return values


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows: list[Any] = []
    numbers: list[int] = []
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(parse_json(line))
            except json.JSONDecodeError as error:
                hint = looks_like(path) if number == 1 else ""
                raise DataError(
                    f"{path}, line {number} is not valid JSON: {error}. Each line must be one object.{hint}"
                ) from error
            except ValueError as error:  # nested too deeply, a number of too many digits
                raise DataError(f"{path}, line {number} cannot be used: {error}.") from error
            numbers.append(number)
    return _objects(rows, str(path), "line", numbers)


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        with _open(path) as file:
            content = parse_json(file.read())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object per line under the name .json is common
            return _read_jsonl(path)
        raise DataError(f"{path} is not valid JSON: {error}.") from error
    except UnicodeDecodeError:
        raise  # whoever asked says what the file looks like
    except ValueError as error:  # nested too deeply, a number of too many digits
        raise DataError(f"{path} cannot be used: {error}.") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        # {"data": [...]} and the like: the one list of objects is the data.
        if len(lists) == 1 and lists[0] and all(isinstance(value, dict) for value in lists[0]):
            content = lists[0]
        else:
            content = [content]
    if not isinstance(content, list):
        raise DataError(f"{path} must hold a list of objects, got {type(content).__name__}.")
    return _objects(content, str(path), "element")


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ending(path) == ".tsv" else ","
    with _open(path, newline="") as lines:
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        rows = []
        try:
            require_distinct(reader.fieldnames or (), path)
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


def require_distinct(columns: Sequence[str], path: Path) -> None:
    """Raise where a column occurs twice."""
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise DataError(
            f"{path} has the column '{twice[0]}' {Counter(columns)[twice[0]]} times; rename or drop all but one. "
            f"Its columns: {', '.join(columns)}."
        )


READERS: dict[str, Callable[[Path], Any]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".arrow": _read_arrow,
}
_COMPRESSIBLE = (".jsonl", ".json", ".csv", ".tsv")
KNOWN = ", ".join(READERS) + ", text also with .gz"


def ending(path: Path) -> str:
    """What decides the reader, in lower case: the last ending, or for compressed text the one before .gz."""
    last = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if last == ".gz" and inner in _COMPRESSIBLE else last


def is_data_file(path: Path) -> bool:
    """Whether there is a reader for it, by its name."""
    return ending(path) in READERS


def read_file(path: Path) -> Any:
    """The rows of a file: a pyarrow table, or a list of dictionaries."""
    import pyarrow as pa

    rows = READERS[ending(path)](path)
    if isinstance(rows, pa.Table):
        require_distinct(rows.column_names, path)
    return rows
