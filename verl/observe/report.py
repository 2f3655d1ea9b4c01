"""`report.html`: a run in one file that needs no network.

The data is embedded compressed, and the browser unpacks only what is opened. Written in bounded memory: texts pass
through one step at a time, and of a run with more than `REPORT_BYTES` steps are left out evenly.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from verl.atomic_file import replacing
from verl.observe.sample_index import SampleIndex
from verl.observe.web_data import KINDS, RunData, WebData, dumps
from verl.observe.web_page import data_element, page

REPORT_BYTES = 64 << 20
"""Of compressed samples."""
TOKEN_SHARE = 0.5
"""Of them: while less is written, steps have their tokens."""
VALIDATION_SHARE = 0.25
CHUNK_BYTES = 1 << 20
"""Of JSON text: what a browser unpacks to show one group."""
_LEVEL = 4
"""Of gzip: the default takes twice the time and saves 8 %."""


def write_report(
    folder: Path | str,
    title: str | None = None,
    others: Sequence[Path] = (),
    *,
    ended: bool = False,
    outside: bool = False,
) -> Path:
    """Write `report.html` from what the run folder holds so far; of `others` curves and settings. `ended`: the run is
    over, although this process still holds its lock. `outside`: as for `WebData`."""
    data = WebData([Path(folder), *others], live=False, outside=outside)
    first = data.runs[0]
    first.run.ended = ended
    target = first.run.path / "report.html"
    before, after = page(title or first.run.name, served=False)
    with replacing(target) as draft, open(draft, "wb") as file:
        file.write(before.encode())
        _embed(file, "runs.json", dumps(data.runs_json()))
        for each in data.runs:
            for name, answer in (
                ("summary", each.summary()),
                ("metrics", each.metrics()),
                ("timeline", each.timeline()),
            ):
                _embed(file, f"run/{each.id}/{name}.json", dumps(answer))
        _write_samples(file, first)
        for each in data.runs[1:]:
            for kind in KINDS:
                index = SampleIndex(each.files(kind))
                there = bool(index.files.steps())
                index.left_out = "this report has the responses of its own run only" if there else ""
                _embed(file, f"run/{each.id}/index/{kind}.json", dumps(index.to_json()))
        file.write(after.encode())
    return target


def spread(steps: Sequence[int]) -> Iterator[int]:
    """Every step once: the first, the newest, then halves, quarters, ... so that any beginning is spread evenly."""
    if not steps:
        return
    yield steps[0]
    if len(steps) > 1:
        yield steps[-1]
    gaps = [(0, len(steps) - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield steps[middle]
                halves += [(low, middle), (middle, high)]
        gaps = halves


def _write_samples(file: IO[bytes], run: RunData) -> None:
    used = 0
    for kind, share in (("validation", VALIDATION_SHARE), ("rollouts", 1.0)):
        used += _Samples(file, run, kind).write(int(share * REPORT_BYTES) - used)


class _Samples:
    """The samples of one kind on their way into the file."""

    def __init__(self, file: IO[bytes], run: RunData, kind: str) -> None:
        self._file, self._run, self._kind = file, run, kind
        self._root = f"run/{run.id}"
        self._index = SampleIndex(run.files(kind))
        self._chunk_of: dict[str, int] = {}
        self._chunks: dict[str, list[int]] = {}
        self._count = self._used = 0

    def write(self, budget: int) -> int:
        """Write the steps that fit, and their index; the bytes that took."""
        there = self._index.files.steps()
        for step in spread(there):
            if self._used >= budget:
                break
            self._write_step(step, with_tokens=self._used < TOKEN_SHARE * budget)
        chosen = len(self._index.steps)
        if chosen < len(there):
            self._index.left_out = (
                f"{chosen} of {len(there)} steps are in this report; verl view RUN --serve shows all"
            )
        _embed(self._file, f"{self._root}/index/{self._kind}.json", dumps(self._index.to_json()))
        where = {"chunks": self._chunks, "of": self._chunk_of}
        _embed(self._file, f"{self._root}/groups/{self._kind}.json", dumps(where))
        return self._used

    def _write_step(self, step: int, with_tokens: bool) -> None:
        parts: list[bytes] = []
        size = 0
        for name, group in self._run.groups_of_step(self._index, self._kind, step, with_tokens):
            parts.append(b"%s:%s" % (dumps(name), dumps(group)))
            size += len(parts[-1])
            self._chunk_of[name] = self._count
            if size >= CHUNK_BYTES:
                self._write_chunk(step, parts)
                parts, size = [], 0
        if parts:
            self._write_chunk(step, parts)

    def _write_chunk(self, step: int, parts: list[bytes]) -> None:
        path = f"{self._root}/groups/{self._kind}/{self._count}"
        self._used += _embed(self._file, path, b'{"groups":{%s}}' % b",".join(parts))
        self._chunks.setdefault(str(step), []).append(self._count)
        self._count += 1


def _embed(file: IO[bytes], path: str, text: bytes) -> int:
    packed = gzip.compress(text, compresslevel=_LEVEL, mtime=0)
    file.write(data_element(path, packed))
    return len(packed)
