"""How rank 0 learns that every rank has written its files: a small note from each in the folder itself.

No collective is needed, so a background save never talks over the same channel as training. The notes are hidden
files and gone before the folder gets its name.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from verl.checkpoint.files import FileRecord
from verl.json_input import read_json


class Records:
    """The notes of one save."""

    def __init__(self, folder: Path, rank: int, world_size: int, timeout_s: float) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s

    def post(self, records: dict[str, FileRecord]) -> None:
        """This rank has written these files."""
        document = {name: record.as_json() for name, record in records.items()}
        note = self._note(self._rank)
        temporary = note.with_suffix(".new")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        os.replace(temporary, note)

    def give_up(self) -> None:
        """This rank could not write its files. An empty file says so: a full disk may have no room for more."""
        with suppress(OSError):
            self._refusal(self._rank).touch()

    def collect(self) -> dict[str, FileRecord]:
        """All ranks' files, once all are there. TimeoutError or OSError names the rank that is missing or failed."""
        deadline = time.monotonic() + self._timeout_s
        joined: dict[str, FileRecord] = {}
        for rank in range(self._world_size):
            while not self._note(rank).exists():
                if self._refusal(rank).exists():
                    raise OSError(f"rank {rank} could not write its files")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} has not written its files after {self._timeout_s:g} s")
                time.sleep(0.01)
            document = read_json(self._note(rank))
            joined |= {name: FileRecord(int(e["size"]), str(e["crc32"])) for name, e in document.items()}
        return joined

    def clear(self) -> None:
        for rank in range(self._world_size):
            self._note(rank).unlink(missing_ok=True)

    def _refusal(self, rank: int) -> Path:
        return self._folder / f".not_written_by_rank_{rank}"

    def _note(self, rank: int) -> Path:
        return self._folder / f".written_by_rank_{rank}.json"
