"""Finished rows of a running generation, one JSON line each, in `OUTPUT.unfinished/` until the output is complete.

A complete line survives any kill; a partial or damaged line is dropped when the journal is reopened and its row is
generated again. Rows of other settings (`settings.json`) are never mixed in. One process at a time.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from verl.checkpoint.files import replace_file, sync_folder
from verl.errors import DataError
from verl.json_input import read_json
from verl.observe.jsonl import parse_row

logger = logging.getLogger(__name__)

SYNC_S = 1.0
"""Seconds between fsyncs: a power cut may lose that much, a kill loses nothing."""


class Journal:
    """Finished rows by their number. Use as a context."""

    def __init__(self, output: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.folder = output.with_name(f"{output.name}.unfinished")
        self._places: dict[int, tuple[int, int]] = {}
        if output.exists() and not overwrite:
            raise DataError(f"data.output_path: {output} exists; set data.overwrite=True, or another name")
        self._make_folder()
        self._file = open(self.folder / "rows.jsonl", "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            self._lock()
            changed = self._changed(settings)
            if changed and not overwrite:
                raise DataError(
                    f"{self.folder} holds responses of an interrupted generation with other settings:\n  "
                    + "\n  ".join(changed)
                    + "\nUse those settings, another data.output_path, or data.overwrite=True"
                )
            if changed:
                self._file.truncate(0)
            replace_file(self.folder / "settings.json", json.dumps(dict(settings), indent=2) + "\n")
            self._end = self._recover()
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"data.output_path: {self.folder} cannot be created: {error.strerror or error}"
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another process writes to {self.folder}; wait, or set another data.output_path"
            ) from None

    def _changed(self, settings: Mapping[str, Any]) -> list[str]:
        """Settings in which the existing rows differ."""
        path = self.folder / "settings.json"
        if not self._file.seek(0, os.SEEK_END):
            return []
        try:
            before = read_json(path)
        except (OSError, ValueError) as error:
            return [f"{path.name} cannot be read: {error}"]
        if not isinstance(before, dict):
            return [f"{path.name} cannot be read: not an object"]
        now = json.loads(json.dumps(dict(settings)))
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return [f"{name}: {_short(before.get(name))} -> {_short(now.get(name))}" for name in changed]

    def _recover(self) -> int:
        """Index complete lines and truncate after the last one."""
        end = damaged = 0
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # interrupted write
                row = _row_of(line)
                if row is None:
                    damaged += 1
                else:
                    self._places[row] = (end, len(line))
                end += len(line)
        if damaged:
            logger.warning("%d lines of %s are damaged: their rows are generated again", damaged, self.folder)
        self._file.truncate(end)
        return end

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, row: int, record: Mapping[str, Any]) -> None:
        """Append a row."""
        line = (json.dumps({"row": row, **record}, ensure_ascii=False) + "\n").encode("utf-8")
        written = 0
        try:
            while written < len(line):  # an unbuffered write may take less than it was given
                written += self._file.write(line[written:]) or 0
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._places[row] = (self._end, len(line))
        self._end += len(line)
        if time.monotonic() - self._synced > SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def read(self, row: int) -> dict[str, Any]:
        """The record of a finished row."""
        place, length = self._places[row]
        record: dict[str, Any] = json.loads(os.pread(self._file.fileno(), length, place))
        del record["row"]
        return record

    def remove(self) -> None:
        """Delete the journal: the output is complete."""
        shutil.rmtree(self.folder)
        sync_folder(self.folder.parent)

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row_of(line: bytes) -> int | None:
    """The row number of a line; None if damaged."""
    found = parse_row(line)
    row = found.get("row") if found is not None else None
    return row if isinstance(row, int) else None


def _short(value: Any, limit: int = 160) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
