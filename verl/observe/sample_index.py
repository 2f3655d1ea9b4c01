"""Columns over all responses of a run, and random access to their texts.

Files are streamed: memory grows by a few hundred bytes per response, whatever its text is. A file is read again only
when it has changed. Codes of a uid never change while an index lives, so that what a page knows of them stays true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.json_input import open_regular
from verl.observe.jsonl import LINE_BYTES, complete_lines, number_or_nan, parse_row
from verl.observe.run_reader import SampleFiles

INDEX_BYTES = 2 << 30
"""Files beyond this are indexed in part: every second step, every fourth, ..."""
INDEX_ROWS = 300_000
PREVIEW = 120
"""Characters of a text that are in the index."""
_PROBE_BYTES = 1 << 18
_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>")
"""Of a chat template."""

Fingerprint = tuple[int, int, int]


_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("line", "offset", "uid", "finish", "source", "turns")),
        ("error", np.bool_),
        *((name, np.float64) for name in ("score", "advantage", "length")),
    ]
)


@dataclass(frozen=True)
class StepColumns:
    """The responses of one file: row i of every column belongs to one response."""

    step: int
    fingerprint: Fingerprint
    rows: np.ndarray
    """Of `_ROW`."""
    previews: list[str]

    def __getitem__(self, name: str) -> list[Any]:
        column: list[Any] = self.rows[name].tolist()
        return column


class SampleIndex:
    """The index of `rollouts/` or `validation/`."""

    def __init__(self, files: SampleFiles) -> None:
        self.files = files
        self.uids: dict[str, int] = {}
        """Numbers of texts that repeat, in the order of their first appearance; likewise those below."""
        self.prompts: list[str] = []
        """The preview of each uid's first prompt."""
        self.finishes: dict[str, int] = {}
        self.sources: dict[str, int] = {}
        self.steps: dict[int, StepColumns] = {}
        """What `refresh` or `read_step` read, by step."""
        self.left_out = ""
        self.version = 0
        """Another number after every change of `steps`."""

    def refresh(self) -> None:
        """Read what is new or changed, within the limits above."""
        there = self.files.steps()
        chosen = self._within_limits(there)
        for step in self.steps.keys() - set(chosen):
            self._forget(step)
        for step in chosen:
            before = self.steps.get(step)
            if before is None or before.fingerprint != fingerprint(self._path(step)):
                self.read_step(step)
        self.left_out = (
            f"{len(chosen)} of {len(there)} steps are shown: the files of all are larger than the viewer reads"
            if len(chosen) < len(there)
            else ""
        )

    def step(self, step: int) -> StepColumns | None:
        """A step that `refresh` read, as its file is now; no other file is looked at."""
        known = self.steps.get(step)
        if known is None or known.fingerprint == fingerprint(self._path(step)):
            return known
        return self.read_step(step)

    def in_order(self) -> list[StepColumns]:
        """By step. What `search` needs: columns do not change after they were read."""
        return [self.steps[step] for step in sorted(self.steps)]

    def read_step(self, step: int) -> StepColumns | None:
        """Index one file; None, and forgotten, where it cannot be read."""
        mark = fingerprint(self._path(step))
        try:
            rows = [] if mark is None else list(self._rows(step))
        except (OSError, ValueError):
            mark = None
        if mark is None:
            self._forget(step)
            return None
        previews = [text for _, text in rows]
        self.steps[step] = StepColumns(step, mark, np.array([row for row, _ in rows], _ROW), previews)
        self.version += 1
        return self.steps[step]

    def _forget(self, step: int) -> None:
        if self.steps.pop(step, None) is not None:
            self.version += 1

    def rows(self, columns: StepColumns, chosen: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line, sample) of the chosen rows. What a file no longer holds is left out."""
        try:
            with open_regular(self._path(columns.step)) as file:
                for row in chosen:
                    line, offset, uid = columns.rows[["line", "offset", "uid"]][row].tolist()
                    file.seek(offset)
                    sample = parse_row(file.readline(LINE_BYTES))
                    if sample is not None and self.uids.get(uid_of(sample, line)) == uid:
                        yield line, sample
        except (OSError, ValueError):
            return

    def to_json(self) -> dict[str, Any]:
        """The columns as the page reads them, steps in order."""
        steps = self.in_order()

        def joined(name: str) -> list[Any]:
            return [value for columns in steps for value in columns[name]]

        def numbers(name: str, digits: int) -> list[float | None]:
            return [None if math.isnan(value) else _short(value, digits) for value in joined(name)]

        return {
            "count": sum(len(columns.rows) for columns in steps),
            "step": [columns.step for columns in steps for _ in columns.rows],
            "line": joined("line"),
            "uid": {"names": list(self.uids), "codes": joined("uid"), "prompts": self.prompts},
            "text": [text for columns in steps for text in columns.previews],
            "score": numbers("score", 12),
            "advantage": numbers("advantage", 6),
            "length": numbers("length", 12),
            "turns": joined("turns"),
            "finish": {"names": list(self.finishes), "codes": joined("finish")},
            "source": {"names": list(self.sources), "codes": joined("source")},
            "error": [int(failed) for failed in joined("error")],
            "left_out": self.left_out,
        }

    def search(self, text: str, steps: Sequence[StepColumns]) -> list[int]:
        """Numbers of the rows of `to_json` that contain a text, in any case; `steps` is what `in_order` gave."""
        wanted = text.casefold()
        # A quick look at the bytes of a line, where escapes and letters that fold to others cannot hide the text.
        plain = wanted.isascii() and wanted.isprintable() and not set(wanted) & set('"\\')
        needle = wanted.encode("utf-8", "surrogatepass")
        matches, first = [], 0
        for columns in steps:
            rows = {line: row for row, line in enumerate(columns["line"])}
            for number, _, line in _lines(self._path(columns.step)):
                skipped = plain and line.isascii() and b"\\" not in line and needle not in line.lower()
                sample = parse_row(line) if number in rows and not skipped else None
                if sample is not None and wanted in searchable(uid_of(sample, number), sample).casefold():
                    matches.append(first + rows[number])
            first += len(rows)
        return matches

    def _path(self, step: int) -> Path:
        return self.files.folder / f"{step}.jsonl"

    def _rows(self, step: int) -> Iterator[tuple[tuple[Any, ...], str]]:
        """The rows of a file, as `_ROW` has them, and the previews of their responses."""
        for number, offset, line in _lines(self._path(step), strict=True):
            sample = parse_row(line)
            if sample is None:
                continue
            uid, written = uid_of(sample, number), model_turns(sample)
            if uid not in self.uids:
                self.uids[uid] = len(self.uids)
                self.prompts.append(preview(_text(sample.get("prompt"))))
            row = (
                number,
                offset,
                self.uids[uid],
                self.finishes.setdefault(_text(_finish(sample)), len(self.finishes)),
                self.sources.setdefault(_text(sample.get("data_source")), len(self.sources)),
                len(written),
                sample.get("error") is not None,
                *(number_or_nan(sample.get(name)) for name in ("score", "advantage", "length")),
            )
            text = " · ".join(_text(turn.get("content")) for turn in written)
            yield row, preview(text or _text(sample.get("response")))

    def _within_limits(self, steps: list[int]) -> list[int]:
        """Every step, or each second, fourth, ... and the newest."""
        sizes = {step: mark[1] for step in steps if (mark := fingerprint(self._path(step))) is not None}
        if not sizes:
            return []
        rows_per_byte = 1.0 / _line_bytes(self._path(max(sizes, key=lambda step: sizes[step])))
        present, stride = list(sizes), 1
        while True:
            chosen = sorted({*present[::stride], present[-1]})
            size = sum(sizes[step] for step in chosen)
            if len(chosen) <= 2 or (size <= INDEX_BYTES and size * rows_per_byte <= INDEX_ROWS):
                return chosen
            stride *= 2


def fingerprint(path: Path) -> Fingerprint | None:
    """What changes when a file is written again; None where there is none."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size, known.st_ino


def uid_of(sample: dict[str, Any], line: int) -> str:
    """The prompt a response belongs to; one without is a group of its own."""
    uid = sample.get("uid")
    return f"line {line}" if uid is None else _text(uid)


def _finish(sample: dict[str, Any]) -> Any:
    """Why a response ended; of a given answer which of its pair it is."""
    return sample.get("answer") if sample.get("finish_reason") is None else sample["finish_reason"]


def model_turns(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a conversation's turns that the model wrote; none where the sample is no conversation."""
    turns = sample.get("turns")
    known = [turn for turn in (turns if isinstance(turns, list) else ()) if isinstance(turn, dict)]
    return [turn for turn in known if turn.get("role") == "assistant"]


def preview(text: str) -> str:
    """A text on one line without a chat template's markers; of a long one its start and its end, where answers are."""
    parts = [text] if len(text) <= 4 * PREVIEW else [text[: 2 * PREVIEW], text[-2 * PREVIEW :]]
    parts = [_MARKER.sub(" ", part) if "<|" in part else part for part in parts]
    words = " … ".join(" ".join(part.split()) for part in parts)
    half = PREVIEW // 2
    return words if len(words) <= PREVIEW else f"{words[:half].rstrip()} … {words[-half:].lstrip()}"


def searchable(uid: str, sample: dict[str, Any]) -> str:
    """All that a search compares, of one response."""
    turns = sample.get("turns")
    contents = [
        turn.get("content") for turn in (turns if isinstance(turns, list) else ()) if isinstance(turn, dict)
    ]
    parts = [uid, *(sample.get(name) for name in ("prompt", "response", "ground_truth", "error")), *contents]
    return "\n".join(_text(part) for part in parts)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def _short(value: float, digits: int) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{digits}g}")


def _lines(path: Path, strict: bool = False) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line) of the complete lines of a file."""
    try:
        with open_regular(path) as file:
            offset = 0
            for number, line in enumerate(complete_lines(file)):
                yield number, offset, line
                offset = file.tell() if not line else offset + len(line)
    except (OSError, ValueError):
        if strict:
            raise


def _line_bytes(path: Path) -> float:
    """The mean length of the first lines of a file."""
    try:
        with open_regular(path) as file:
            start = file.read(_PROBE_BYTES)
    except (OSError, ValueError):
        return float(_PROBE_BYTES)
    return max(1.0, len(start) / max(1, start.count(b"\n")))
