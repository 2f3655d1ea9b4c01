"""Files with one JSON object per line, such as `metrics.jsonl`, and conversion of what a run holds to plain JSON.

A line that a full disk or a kill cut short affects no other: an append that fails truncates what it wrote, the next
starts on its own line, and readers skip what is not a row, with one warning. A number that is not finite becomes null,
so "null" means not finite and "absent" not measured.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.json_input import open_regular, parse_json

logger = logging.getLogger(__name__)

LINE_BYTES = 16 << 20
"""Lines beyond this are left out: no response is that long, and a terminal could not show it."""

Row = dict[str, Any]


def append_line(path: Path, text: str) -> None:
    """Append a line, or nothing if the write fails."""
    with open(path, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        cut = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        left = memoryview(f"{chr(10) if cut else ''}{text}\n".encode())
        try:
            while left:  # an unbuffered write may take less than it was given
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def parse_row(line: bytes) -> Row | None:
    """The object on a line; None where there is none. An integer no float can hold is infinite, as 1e400 is."""
    try:
        row = parse_json(
            line.decode("utf-8"), parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits)
        )
    except ValueError:  # also bytes that are no text
        return None
    return row if isinstance(row, dict) else None


def parse_metrics(line: bytes) -> Row | None:
    """A row of `metrics.jsonl`: an object with a step."""
    row = parse_row(line)
    step = row.get("step") if row is not None else None
    return row if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 1 << 63 else None


def read_jsonl(path: Path, parse: Callable[[bytes], Row | None] = parse_row) -> Iterator[Row]:
    """The rows of a file. Lines that are not rows are left out; one warning says how many."""
    return (row for _, row in parsed_lines(path, parse))


def parsed_lines(path: Path, parse: Callable[[bytes], Row | None]) -> Iterator[tuple[bytes, Row]]:
    """The lines of a file that are rows, and the rows; one warning says how many are not."""
    try:
        file = open_regular(path)
    except ValueError as error:
        raise OSError(f"{path} cannot be read: {error}") from None
    damaged = 0
    with file:
        for line in filter(bytes.strip, file):
            row = parse(line)
            damaged += row is None
            if row is not None:
                yield line, row
    if damaged:
        lines = "1 line is" if damaged == 1 else f"{damaged} lines are"
        why = "cut short by a full disk or a kill, or written by another program"
        logger.warning("%s: %s left out: %s", path, lines, why)


def read_metrics(path: Path) -> list[Row]:
    """The rows of a `metrics.jsonl`; none where there is no such file."""
    try:
        return list(read_jsonl(path, parse_metrics))
    except FileNotFoundError:
        return []


def complete_lines(file: Any, limit: int = LINE_BYTES) -> Iterator[bytes]:
    """The lines of a binary file that have their end, one at a time; one beyond `limit` comes as b""."""
    while True:
        line = file.readline(limit)
        if line.endswith(b"\n"):
            yield line
        elif len(line) < limit:
            return  # half-written, or the end
        else:
            while (chunk := file.readline(limit)) and not chunk.endswith(b"\n"):
                pass
            if not chunk:
                return
            yield b""


def number_or_nan(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return math.nan
    return float(value)


_PLAIN = frozenset((str, bool, int, type(None)))


def jsonable(value: Any) -> Any:
    """The same value in the types JSON knows."""
    if type(value) is dict:  # thousands of rows a step are such: few calls
        return {
            key if type(key) is str else str(key): item if type(item) in _PLAIN else jsonable(item)
            for key, item in value.items()
        }
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, Set):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, Sequence):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return jsonable(value.tolist())
    return str(value)


def plain(value: Any) -> Any:
    """What a cell of a table can hold: a number or a text."""
    value = jsonable(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of the metrics that a float can hold."""
    found = {}
    for name, value in metrics.items():
        with suppress(OverflowError):  # an integer above what a float can hold
            if isinstance(value, (int, float)):
                found[name] = float(value)
    return found


def encoded(plain: Any, separators: tuple[str, str] | None = None) -> bytes:
    """JSON in UTF-8; half of a surrogate pair, which JSON text can hold and UTF-8 cannot, stays an escape."""
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=separators).encode()
    except UnicodeEncodeError:
        return json.dumps(plain, allow_nan=False, separators=separators).encode()


def dumps(value: Any) -> str:
    """One line of JSON."""
    return encoded(jsonable(value)).decode()
