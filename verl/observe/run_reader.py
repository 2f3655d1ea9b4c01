"""Read a run folder while it is written, after it was killed, or on a copy elsewhere.

Nothing here writes or locks. A half-written last line is left for the next `poll`, a damaged one is counted, and
memory does not grow with the length of the run: of the older rows of `metrics.jsonl` every second is kept, every
fourth, ..., and samples are streamed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, DataError
from verl.json_input import open_regular
from verl.observe.diagnoses import Finding, read_findings
from verl.observe.jsonl import complete_lines, parse_metrics, parse_row
from verl.observe.run_folder import LINEAGE, expanded, locked_by_this_process

TAIL_BYTES = 64 << 20
KEPT_ROWS = 2000
"""The newest rows of `metrics.jsonl`, and at most as many of those before them."""
KEPT_FINDINGS = 10_000
RUN_FILES = ("metrics.jsonl", "config.yaml", "crash.txt", ".lock")
_FURTHER_FILES = (LINEAGE, "crash.previous.txt", "health.jsonl")
KINDS = {"rollouts": "trainer.rollout_data_dir", "validation": "trainer.validation_data_dir"}
"""Of samples: their folders, and the keys that name others."""
_FOLDERS = (*KINDS, "phases")


class MetricsLog:
    """The rows of `metrics.jsonl`, of very many before the newest only some; `poll` reads what was appended since the
    last call."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        """Numbers by name. One that was not finite is NaN."""
        self.first: dict[str, Any] = {}
        self.findings: list[tuple[int, Finding]] = []
        """(step, finding), the newest `KEPT_FINDINGS`."""
        self.damaged = 0
        self.problem = ""
        """Why nothing can be read, where it is no file of lines."""
        self._tail_bytes, self._offset, self._inode, self._stride = tail_bytes, 0, -1, 1

    def poll(self) -> list[dict[str, Any]]:
        """The new rows, of very many the newest. After a resume, which rewrites the file, all of them."""
        try:
            with open_regular(self.path) as file:
                known = os.fstat(file.fileno())
                if known.st_ino != self._inode or known.st_size < self._offset:
                    self._inode, self._offset = known.st_ino, 0
                    self.rows, self.first, self.findings, self.damaged, self._stride = [], {}, [], 0, 1
                    if known.st_size > self._tail_bytes:
                        file.seek(known.st_size - self._tail_bytes)
                        next(complete_lines(file), b"")  # most likely half of one
                        self._offset = file.tell()
                        self.problem = "metrics.jsonl is very large: only its end was read"
                file.seek(self._offset)
                return list(deque(self._new_rows(file), KEPT_ROWS))
        except FileNotFoundError:
            return []
        except ValueError as error:
            self.problem = f"{self.path.name} is {error}"
            return []
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def last(self) -> dict[str, Any]:
        return self.rows[-1] if self.rows else {}

    def names(self) -> list[str]:
        return sorted({name for row in self.rows for name in row} - {"step"})

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, oldest first, finite ones only."""
        return [(row["step"], row[name]) for row in self.rows if math.isfinite(row.get(name, math.nan))]

    def _new_rows(self, file: Any) -> Iterator[dict[str, Any]]:
        for line in complete_lines(file):
            self._offset = file.tell()
            row = parse_metrics(line)
            if row is None:
                self.damaged += bool(line.strip())
                continue
            self.findings += ((row["step"], found) for found in read_findings(row.get("findings")))
            del self.findings[:-KEPT_FINDINGS]
            plain = {name: math.nan if value is None else value for name, value in row.items()}
            numbers = {
                n: v for n, v in plain.items() if isinstance(v, int | float) and not isinstance(v, bool)
            }
            self.first = self.first or numbers
            self.rows.append(numbers)
            if len(self.rows) > 2 * KEPT_ROWS:
                self._thin()
            yield numbers

    def _thin(self) -> None:
        """Of the rows before the newest keep about half as many, evenly spread; those with a validation longer."""
        older = self.rows[:-KEPT_ROWS]
        while True:
            validated = max(1, self._stride // 8)
            strides = (validated if any(n.startswith("val") for n in row) else self._stride for row in older)
            older = [row for row, stride in zip(older, strides, strict=True) if row["step"] % stride == 0]
            if len(older) <= KEPT_ROWS // 2:
                break
            self._stride *= 2
            if self._stride > 1 << 60:  # many rows of one step
                older = []
        self.rows[:-KEPT_ROWS] = older


@dataclass(frozen=True)
class SampleFiles:
    """`rollouts/` or `validation/`: one file of samples per step."""

    folder: Path

    def steps(self) -> list[int]:
        """The steps that have samples, oldest first."""
        try:
            names = os.listdir(self.folder)
        except (OSError, ValueError):
            return []
        return sorted(int(name[:-6]) for name in names if name.endswith(".jsonl") and name[:-6].isdecimal())

    def rows(self, step: int, maybe: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict[str, Any]]:
        """The samples of a step, one at a time; lines for which `maybe` is False are not parsed."""
        try:
            with open_regular(self.folder / f"{step}.jsonl") as file:
                for line in complete_lines(file):
                    if maybe(line) and (row := parse_row(line)) is not None:
                        yield row
        except (OSError, ValueError):
            return  # a resumed run removes the steps it writes again


@dataclass
class Run:
    """A run folder, opened for reading."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_problem: str = ""
    log: MetricsLog = field(default_factory=lambda: MetricsLog(Path()))
    ended: bool = False
    """Said by the run's own process, which still holds the lock."""
    outside: bool = True
    """Whether samples are read that its config keeps outside of its folder."""

    @property
    def name(self) -> str:
        name = f"{self.path.parent.name}/{self.path.name}"
        return os.fsencode(name).decode("utf-8", errors="replace")  # a file name may be any bytes

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
        """Whether it trains on given answers (fine-tuning, preferences, a reward model)."""
        return "actor_rollout_ref" not in self.config and ("optim" in self.config or "model" in self.config)

    def samples(self, kind: str) -> SampleFiles:
        """Of `KINDS`; where the config names a folder that is not read, the run's own."""
        chosen = self._chosen(kind)
        return SampleFiles(chosen if self.outside or _leads_into(self.path, chosen) else self.path / kind)

    def left_out(self) -> list[str]:
        """Keys that name folders of samples which are not read."""
        return [key for kind, key in KINDS.items() if self.samples(kind).folder != self._chosen(kind)]

    def _chosen(self, kind: str) -> Path:
        """The folder that the config names for samples, or the usual one."""
        return expanded(str(self.get(KINDS[kind]) or self.path / kind)).absolute()

    @property
    def step(self) -> int | None:
        return self.log.last().get("step")

    @property
    def total_steps(self) -> int | None:
        """Where the config has it; a run counted in epochs does not."""
        total = self.get("trainer.total_training_steps")
        return total if isinstance(total, int) and total > 0 else None

    def seconds_per_step(self, window: int = 20) -> float | None:
        """Of the newest steps, with the validations and checkpoints between them."""
        rows = [row for row in self.log.rows[-window:] if math.isfinite(row.get("timing_s/step", math.nan))]
        names = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
        spent = [row[name] for row in rows for name in names if math.isfinite(row.get(name, math.nan))]
        return sum(spent) / len(rows) if rows else None


def open_run(path: Path, *, outside: bool = True, tail_bytes: int = TAIL_BYTES) -> Run:
    """Open a run folder; DataError when it is none. `outside=False`: nothing outside of it is read, whatever its files
    say; DataError where a file that would be read is a link out of it."""
    path = expanded(path).absolute()
    if not is_run(path):
        kind = "is not a run folder" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {kind}; give a run folder (checkpoints/PROJECT/EXPERIMENT)")
    if not outside:
        refuse_links_out(path)
    config, problem = _config(path / "config.yaml")
    run = Run(path, config, problem, MetricsLog(path / "metrics.jsonl", tail_bytes), outside=outside)
    run.log.poll()
    return run


def _leads_into(run: Path, path: Path) -> bool:
    """Whether a path, its links followed, is in the run folder."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run))
    except ValueError:  # no name of a file
        return False


def refuse_links_out(run: Path) -> None:
    """DataError where a file, or a folder of files, that would be read is not in the run folder."""
    links = [run / name for name in (*RUN_FILES, *_FURTHER_FILES, *_FOLDERS) if (run / name).is_symlink()]
    for name in _FOLDERS:
        with contextlib.suppress(OSError), os.scandir(run / name) as entries:
            links += [run / name / entry.name for entry in entries if entry.is_symlink()]
    for link in links:
        if not _leads_into(run, link):
            raise DataError(f"{link} leads out of the run folder; --outside reads it all the same")


def is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in RUN_FILES)


def find_runs(folder: Path) -> list[Path]:
    """The run folders at or up to three levels below `folder`, the one written last first."""
    found, level = [], [expanded(folder).absolute()]
    for _ in range(4):
        found += [path for path in level if is_run(path)]
        below: list[Path] = []
        for path in (path for path in level if not is_run(path)):
            with contextlib.suppress(OSError):
                children = (
                    child for child in path.iterdir() if not child.name.startswith((".", "global_step_"))
                )
                below += [child for child in children if child.is_dir()]
        level = below
    return sorted(found, key=last_written, reverse=True)


def last_written(run: Path) -> float:
    """When the run last wrote something (seconds since the epoch)."""
    files = (run / name for name in ("metrics.jsonl", "crash.txt", "config.yaml"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def checkpoint_steps(run: Path) -> list[int]:
    """The steps with a checkpoint folder, oldest first; `verl ckpt` checks whether they are intact."""
    matches = (re.fullmatch(r"global_steps?_(\d+)", child.name) for child in run.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def _config(path: Path) -> tuple[dict[str, Any], str]:
    from verl.config.sources import load_yaml

    if not path.is_file():
        return {}, "there is no config.yaml"
    try:
        values = load_yaml(path)
    except ConfigError as error:
        return {}, f"config.yaml cannot be read: {error}"
    return (values, "") if isinstance(values, dict) else ({}, "config.yaml holds no keys")


# -- what became of the run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    name: str
    """waiting, running, finished, stopped, crashed or killed."""
    text: str

    @property
    def over(self) -> bool:
        return self.name not in ("waiting", "running")


def state_of(run: Run) -> State:
    """From the lock file, crash.txt, the metrics and the checkpoints."""
    owner, alive = ("", False) if run.ended else lock_owner(run.path)
    quiet_s = time.time() - last_written(run.path)
    late = quiet_s > max(600.0, 10 * (run.seconds_per_step() or 60.0))
    wrote = f"last wrote {duration(quiet_s)} ago"
    if alive:
        slow = "; that is long for its steps: it may hang" if late else ""
        return State("running", f"running ({owner}); {wrote}{slow}")
    if (crash := read_crash(run.path)) is not None:
        return State("crashed", f"crashed: {crash[0]}")
    if run.step is None:
        return State("waiting", "no step has finished, and no process is running")
    if finished(run):
        return State("finished", f"finished after step {run.step}")
    saved = checkpoint_steps(run.path)
    never = "there is no checkpoint to resume from"
    resume = f"the same command resumes at step {saved[-1]}" if saved else never
    if saved and saved[-1] == run.step:
        of = f" of {run.total_steps}" if run.total_steps else ""
        return State("stopped", f"stopped at step {run.step}{of}, with a checkpoint; {resume}")
    if alive is None and not late:
        return State("running", f"probably running ({owner}); {wrote}")
    return State("killed", f"killed after step {run.step} (or the machine stopped); {resume}")


def finished(run: Run) -> bool:
    """Whether all steps of the config are done."""
    if run.step is None or run.get("trainer.val_only"):
        return run.step is not None
    if run.total_steps is not None:
        return run.step >= run.total_steps
    # Older versions wrote the epochs done as training/epoch.
    last, epochs = run.log.last(), run.get("trainer.total_epochs")
    done = last.get("training/epochs_done", last.get("training/epoch"))
    return isinstance(epochs, int) and isinstance(done, int | float) and done >= epochs


def lock_owner(path: Path) -> tuple[str, bool | None]:
    """(owner as the lock file names it, whether that process is alive); None: on another machine, not known."""
    import psutil

    if locked_by_this_process(path):
        return f"process {os.getpid()}, this one", True
    try:
        with open_regular(path / ".lock") as file:
            owner = file.read(200).decode("utf-8", errors="replace").strip()
            locked_at = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError):
        return "", False
    match = re.fullmatch(r"process (\d{1,9}) on (.*)", owner)
    if match is None:
        return owner, False
    if match[2] != socket.gethostname():
        return owner, None
    try:
        # A process that started after the lock was taken has only the same number.
        return owner, psutil.Process(int(match[1])).create_time() <= locked_at + 1.0
    except psutil.Error:
        return owner, False


def read_crash(path: Path, name: str = "crash.txt") -> tuple[str, str] | None:
    """(cause, fix) of `crash.txt`; None where there is none."""
    try:
        with open_regular(path / name) as file:
            parts = file.read(200_000).decode("utf-8", errors="replace").split("\n\n")
    except (OSError, ValueError):
        return None
    fix = next((part for part in parts[1:3] if part.startswith("What to do: ")), "")
    return parts[0].strip() or f"{name} is empty", fix.removeprefix("What to do: ")


def duration(seconds: float) -> str:
    """In the largest unit that reads well."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


# -- findings -----------------------------------------------------------------------------------------------------


@dataclass
class Notice:
    """What a diagnosis reported last, and at which steps it did."""

    finding: Finding
    first: int
    last: int
    times: int
    recent: bool

    @property
    def when(self) -> str:
        steps = f"steps {self.first}-{self.last}, {self.times} times"
        return f"step {self.last}" if self.times == 1 else steps

    def to_row(self) -> dict[str, Any]:
        """The finding and these numbers, as the page of the viewer reads them."""
        numbers = {name: getattr(self, name) for name in ("first", "last", "times", "recent")}
        return self.finding.to_row() | numbers


def notices(run: Run) -> list[Notice]:
    """What the diagnoses reported while the run ran, recent ones first."""
    from verl.observe.health import QUIET_STEPS

    found: dict[str, Notice] = {}
    for step, finding in [*_health_file(run), *run.log.findings]:
        before = found.get(finding.rule)
        first, times = (before.first, before.times + 1) if before else (step, 1)
        found[finding.rule] = Notice(finding, first, step, times, (run.step or 0) - step < QUIET_STEPS)
    return sorted(found.values(), key=lambda notice: (not notice.recent, -notice.last))


def _health_file(run: Run) -> Iterator[tuple[int, Finding]]:
    """Of runs whose findings are in `health.jsonl`, as whole lines."""
    try:
        with open_regular(run.path / "health.jsonl") as file:
            for row in filter(None, map(parse_metrics, complete_lines(file))):
                yield row["step"], Finding(str(row.get("rule")), str(row.get("line")))
    except (OSError, ValueError):
        return
