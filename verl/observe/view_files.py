"""Reading a run folder without owning it: while it is written, after it was cut off, and when it is huge.

What always holds: nothing here writes or takes a lock; a half-written last line is left for the next look, a
damaged one is left out and counted; what is kept in memory does not grow with the length of the texts; of a
`metrics.jsonl` above `TAIL_BYTES` only the end is read.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, DataError
from verl.json_input import open_regular
from verl.observe.jsonl import LINE_BYTES, parse_metrics, parse_row, whole_lines

TAIL_BYTES = 64 << 20
KEPT_ROWS = 2000
"""Whole rows that are kept; of older ones the curves alone."""

RUN_FILES = ("metrics.jsonl", "config.yaml", "crash.txt", ".lock")


class Series:
    """One metric over the steps; packed, because a long run has millions of numbers."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)

    def finite(self) -> list[tuple[int, float]]:
        """(step, value), oldest first, without what was not finite."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]


class MetricsLog:
    """`metrics.jsonl`, read on from where the last look ended. Call `poll` to look again."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        """The newest rows: numbers by name. One that was not finite is NaN."""
        self.series: dict[str, Series] = {}
        self.steps = 0
        """Rows read."""
        self.damaged = 0
        self.cut = False
        """Whether the beginning of the file was left out because the file is too large."""
        self.problem = ""
        """Why nothing can be read, where it is no file of lines."""
        self._tail_bytes = tail_bytes
        self._offset = 0
        self._inode = -1

    def poll(self) -> list[dict[str, Any]]:
        """The rows that came since the last call (of very many the newest). A run that went back in time (a resume)
        starts the log over."""
        try:
            with open_regular(self.path) as file:
                known = os.fstat(file.fileno())
                if known.st_ino != self._inode or known.st_size < self._offset:
                    self._start_over(known.st_ino)
                    self._skip_to_tail(file, known.st_size)
                file.seek(self._offset)
                return list(deque(self._read(file), maxlen=KEPT_ROWS))
        except FileNotFoundError:
            return []
        except ValueError as error:
            self.problem = f"{self.path.name} is {error}"
            return []
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, oldest first, without what was not finite."""
        return self.series[name].finite() if name in self.series else []

    def _start_over(self, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self.rows, self.series, self.steps, self.damaged, self.cut = [], {}, 0, 0, False

    def _skip_to_tail(self, file: Any, size: int) -> None:
        if size > self._tail_bytes:
            file.seek(size - self._tail_bytes)
            while (piece := file.readline(LINE_BYTES)) and not piece.endswith(b"\n"):
                pass
            self._offset, self.cut = file.tell(), True

    def _read(self, file: Any) -> Iterator[dict[str, Any]]:
        for line in whole_lines(file):
            self._offset = file.tell()
            row = parse_metrics(line)
            if row is None:
                self.damaged += bool(line.strip())
                continue
            self._add(row)
            yield row

    def _add(self, row: dict[str, Any]) -> None:
        step = row["step"]
        for name, value in list(row.items()):
            if value is None:
                row[name] = value = float("nan")
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                del row[name]  # not a metric
            elif name != "step":
                self.series.setdefault(name, Series()).add(step, float(value))
        self.rows.append(row)
        self.steps += 1
        if len(self.rows) > 2 * KEPT_ROWS:
            del self.rows[:-KEPT_ROWS]


@dataclass(frozen=True)
class SampleFiles:
    """`rollouts/` or `validation/`: a file of samples for each step."""

    folder: Path
    name: str

    def steps(self) -> list[int]:
        """The steps there are samples of, oldest first."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        return sorted(int(name[:-6]) for name in names if name.endswith(".jsonl") and name[:-6].isdecimal())

    def rows(self, step: int, maybe: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict[str, Any]]:
        """The samples of a step, one at a time; lines for which `maybe` is False are not even parsed."""
        try:
            with open_regular(self.folder / f"{step}.jsonl") as file:
                for line in whole_lines(file):
                    if maybe(line) and (row := parse_row(line)) is not None:
                        yield row
        except (OSError, ValueError):
            return  # a resumed run removes the steps it writes again

    def steps_after(self, step: int) -> list[int]:
        return [number for number in self.steps() if number > step]


@dataclass
class Run:
    """A run folder, looked at."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_problem: str = ""
    log: MetricsLog = field(default_factory=lambda: MetricsLog(Path()))
    rollouts: SampleFiles = field(default_factory=lambda: SampleFiles(Path(), "rollouts"))
    validation: SampleFiles = field(default_factory=lambda: SampleFiles(Path(), "validation"))

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the run's config by its dotted name."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if value is None else value

    @property
    def is_sft(self) -> bool:
        return "actor_rollout_ref" not in self.config and ("optim" in self.config or "model" in self.config)


def health_rows(run: Run) -> Iterator[tuple[int, str, str]]:
    """(step, rule, line): what the health rules found while the run ran, oldest first."""
    try:
        with open_regular(run.path / "health.jsonl") as file:
            for row in filter(None, map(parse_metrics, whole_lines(file))):
                yield row["step"], str(row.get("rule")), str(row.get("line"))
    except (OSError, ValueError):
        return


def open_run(path: Path) -> Run:
    """Look at a run folder; DataError when it is none."""
    path = path.expanduser().absolute()
    if not is_run(path):
        raise DataError(_no_run(path))
    run = Run(path, log=MetricsLog(path / "metrics.jsonl"))
    run.config, run.config_problem = _config(path / "config.yaml")
    run.rollouts = SampleFiles(_elsewhere(run, "trainer.rollout_data_dir", "rollouts"), "rollouts")
    run.validation = SampleFiles(_elsewhere(run, "trainer.validation_data_dir", "validation"), "validation")
    run.log.poll()
    return run


def is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in RUN_FILES)


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """The run folders at or below `folder`, the one written last first."""
    found: list[Path] = []

    def look(here: Path, left: int) -> None:
        if is_run(here):
            found.append(here)
            return
        if not left:
            return
        try:
            children = [entry for entry in os.scandir(here) if entry.is_dir(follow_symlinks=True)]
        except OSError:
            return
        for child in children:
            if not child.name.startswith((".", "global_step_")):
                look(Path(child.path), left - 1)

    look(folder.expanduser().absolute(), depth)
    return sorted(found, key=changed, reverse=True)


def changed(run: Path) -> float:
    """When the run last wrote something (seconds since the epoch)."""
    times = []
    for name in ("metrics.jsonl", "crash.txt", "config.yaml"):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def checkpoint_steps(run: Path) -> list[int]:
    """The steps with a checkpoint folder, oldest first; whether they are whole is for `verl ckpt` to say."""
    try:
        names = os.listdir(run)
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"global_steps?_(\d+)", name)))


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"there is no folder {path}. Give a run folder (checkpoints/PROJECT/EXPERIMENT)"
    if not path.is_dir():
        return f"{path} is a file; give the run folder it lies in"
    return f"{path} is not a run folder: it holds none of {', '.join(RUN_FILES[:3])}"


def _config(path: Path) -> tuple[dict[str, Any], str]:
    from verl.config.yaml_file import load_yaml

    if not path.is_file():
        return {}, "there is no config.yaml"
    try:
        values = load_yaml(path)
    except ConfigError as error:
        return {}, f"config.yaml cannot be read: {error}"
    return (values, "") if isinstance(values, dict) else ({}, "config.yaml holds no keys")


def _elsewhere(run: Run, key: str, name: str) -> Path:
    given = run.get(key)
    return Path(str(given)).expanduser() if given else run.path / name
