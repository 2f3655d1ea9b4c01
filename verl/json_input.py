"""Reading JSON that others may have written, or that a full disk may have cut.

Whatever is wrong with the text is a ValueError, which the caller turns into an error that names the file. Only regular
files are read (a FIFO would block for ever, a device has no end), and only up to a size. A file is replaced as a whole
(`replacing`).
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_DEPTH = 100
"""Levels of nesting; code that walks what was read recursively relies on it."""
MAX_BYTES = 64 << 20
IDENTITY = {"Accept-Encoding": "identity"}
"""Sent with every request to a server: a few compressed bytes can become gigabytes before anybody counts them."""


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Whether a server's answer is compressed although `IDENTITY` was sent: nothing of it may be read."""
    return headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity")


def parse_json(text: str | bytes, parse_int: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; `parse_int` makes the integers in it."""
    try:
        value = json.loads(text, parse_int=parse_int)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:  # type: ignore[arg-type]
        check_nesting(value)
    return value


def read_json(path: Path | str) -> Any:
    """The value in a small file. OSError where it cannot be opened."""
    return parse_json(read_text(path))


def read_text(path: Path | str) -> str:
    """The text in a small file. OSError where it cannot be opened."""
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes")
    return content.decode("utf-8")


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading; ValueError for anything else, without waiting for a FIFO's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_nesting(value: Any, max_values: int | None = None) -> None:
    """ValueError for more than `MAX_DEPTH` levels, or more than `max_values` values."""
    level, depth, values = [value], 0, 1
    while level := [
        child
        for each in level
        for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
    ]:
        depth, values = depth + 1, values + len(level)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if max_values is not None and values > max_values:
            raise ValueError(f"more than {max_values:,} keys and values")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place after the block; it is removed where the block fails."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def mode_of_new_files(folder: Path) -> int:
    """The permissions of a file that is created in `folder`: to read the umask alone would change it for a moment."""
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        file = Path(inner) / "file"
        file.touch()
        return stat.S_IMODE(file.stat().st_mode)
