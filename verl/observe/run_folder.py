"""The run folder: the files a run writes for its user.

    config.yaml              the resolved configuration
    metrics.jsonl            one line per step: {"step": N, name: number, ...}, with "findings" where there are any
    rollouts/{step}.jsonl    samples of training
    rollouts/{step}.parquet  numbers of every token of them (`verl.observe.token_table`)
    validation/{step}.jsonl  samples of validation
    profile/step_{N}_rank_{R}.json.gz   traces of torch's profiler
    phases/{process}.jsonl   when phases of steps began and ended, by process
    counters.json            what the counters for Prometheus had reached
    crash.txt                cause and fix, when a run ended badly
    engine_logs/*.txt        logs of vLLM's and SGLang's servers that failed
    lineage.json             of a fork: the run and the step it continues
    metrics.previous.jsonl   of an earlier run, where a new one began in its folder

One process at a time uses a folder. Files are replaced atomically, except `metrics.jsonl`, which
grows: lines of it that a full disk or a kill cut short are skipped by readers and removed on resume.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.keys import mask_text
from verl.errors import ConfigError, VerlError
from verl.json_input import parse_json, read_json, replacing
from verl.observe.diagnoses import Finding
from verl.observe.jsonl import append_line, dumps, jsonable, parse_metrics, parsed_lines, read_metrics

logger = logging.getLogger(__name__)

LINEAGE = "lineage.json"

# Record locks belong to a process, so a second user in the same process is refused by this table.
_locked_folders: set[tuple[int, str]] = set()


def default_run_path(project: str, experiment: str) -> Path:
    return Path("checkpoints") / project / experiment


def expanded(path: Path | str) -> Path:
    """With the home folder for a leading ~; unlike `Path.expanduser`, as it is where that user does not exist."""
    return Path(os.path.expanduser(path))


class RunFolder:
    """A run folder, opened for writing and locked until `close`."""

    def __init__(
        self,
        path: Path | str,
        *,
        rollout_dir: Path | str | None = None,
        validation_dir: Path | str | None = None,
    ) -> None:
        self.path = expanded(path).absolute()
        self.metrics_file, self.counters_file = self.path / "metrics.jsonl", self.path / "counters.json"
        self.phases_dir = self.path / "phases"
        self.rollout_dir = expanded(rollout_dir) if rollout_dir else self.path / "rollouts"
        self.validation_dir = expanded(validation_dir) if validation_dir else self.path / "validation"
        _require_writable(self.path, "trainer.default_local_dir")
        _require_writable(self.rollout_dir, "trainer.rollout_data_dir")
        _require_writable(self.validation_dir, "trainer.validation_data_dir")
        self._lock = _FolderLock(self.path)
        self._writer: threading.Thread | None = None
        self._crash_file = self.path / "crash.txt"
        if self._crash_file.exists():
            _move_aside(self._crash_file, "crash.previous.txt")
        file = self.metrics_file
        if file.exists() and not file.is_file():
            aside = _move_aside(file, f"{file.name}.unusable")
            logger.warning("%s is not a regular file; renamed to %s", file, aside.name)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """The resolved configuration, so that `--config-path` with this file repeats the run."""
        import yaml

        text = yaml.safe_dump(jsonable(config), sort_keys=False, allow_unicode=True, default_flow_style=False)
        try:
            write_atomically(self.path / "config.yaml", text)
        except OSError as error:
            raise VerlError(_cannot_write(self.path, error, "trainer.default_local_dir")) from None

    def previous_config(self) -> dict[str, Any] | None:
        """The configuration of the run that was here before; None where there was none that can be read."""
        from verl.config.sources import load_yaml

        try:
            return load_yaml(self.path / "config.yaml")
        except ConfigError:
            return None

    def append_metrics(self, step: int, metrics: Mapping[str, Any], findings: Sequence[Finding] = ()) -> None:
        noted = {"findings": [finding.to_row() for finding in findings]} if findings else {}
        append_line(self.metrics_file, dumps({"step": step, **metrics, **noted}))

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.metrics_file)

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        return self._write_rows(self.rollout_dir / f"{step}.jsonl", rows)

    def tokens_file(self, step: int) -> Path:
        return self.rollout_dir / f"{step}.parquet"

    def in_background(self, *writes: Callable[[], None]) -> None:
        """Call `writes`, which write samples, in a thread, after those before them are done. A failure is a warning."""

        def act() -> None:
            for write in writes:
                try:
                    write()
                except Exception as error:
                    kind = type(error).__name__
                    logger.warning("samples could not be written: %s: %s. The run continues", kind, error)

        self.wait()
        self._writer = threading.Thread(target=act, name="samples")
        self._writer.start()

    def wait(self) -> None:
        """Until what is written in the background is in its files."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def write_validation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        return self._write_rows(self.validation_dir / f"{step}.jsonl", rows)

    def rewind(self, step: int) -> bool:
        """Remove what came after `step`, which a resumed run writes again; whether the metrics of `step` are there, or
        in the run that this one was forked from."""
        self.wait()
        lineage = read_lineage(self.path)
        found = lineage is not None and lineage.step == step
        if self.metrics_file.exists():
            kept: list[bytes] = []
            for line, row in parsed_lines(self.metrics_file, parse_metrics):
                found = found or row["step"] == step
                if row["step"] <= step:
                    kept.append(line.rstrip(b"\r\n") + b"\n")
            if sum(map(len, kept)) != self.metrics_file.stat().st_size:
                write_atomically(self.metrics_file, b"".join(kept))
        samples = [*_sample_files(self.rollout_dir), *_sample_files(self.validation_dir)]
        _remove(file for file in samples if int(file.stem) > step)
        _remove(file for number, _, file in profile_files(self.path) if number > step)
        self._cut_phases(step)
        return found

    def restart(self) -> None:
        """For a run that starts over: rename the metrics of an earlier one and remove its samples."""
        self.wait()
        if self.metrics_file.exists() and self.metrics_file.stat().st_size:
            _move_aside(self.metrics_file, "metrics.previous.jsonl")
        for folder in (self.rollout_dir, self.validation_dir):
            if folder.parent == self.path:  # one the user chose may be others' as well
                _remove(_sample_files(folder))
        # health.jsonl: of a version that did not keep findings in metrics.jsonl
        files = (self.path / LINEAGE, self.path / "health.jsonl", self.counters_file)
        _remove(file for file in files if file.exists())
        _remove(file for _, _, file in profile_files(self.path))
        self._cut_phases(None)

    def _cut_phases(self, step: int | None) -> None:
        """Remove the phases after `step` (None: all). In place: ranks have these files open, to append to them."""
        for file in self.phases_dir.glob("*.jsonl"):
            try:
                os.truncate(file, 0 if step is None else _length_up_to(file, step))
            except OSError as error:
                logger.warning("the phases in %s could not be removed: %s", file, error)

    def write_crash(self, error: BaseException, fix: str = "") -> None:
        """Cause first, fix second, traceback last."""
        parts = [f"{type(error).__name__}: {error}".rstrip()]
        if fix:
            parts.append(f"What to do: {fix}")
            logger.error("%s", fix)
        parts.append(f"When: {time.strftime('%Y-%m-%d %H:%M:%S %Z')}")
        parts.append("".join(traceback.format_exception(error)).rstrip())
        try:
            write_atomically(self._crash_file, mask_text("\n\n".join(parts)) + "\n")
        except OSError as failed:  # the crash itself matters more than its record
            logger.warning("%s could not be written: %s", self._crash_file, failed)

    def close(self) -> None:
        self.wait()
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_rows(self, file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
        """A full disk loses samples, not the run."""
        try:
            write_atomically(file, "".join(dumps(row) + "\n" for row in rows))
        except OSError as error:
            logger.warning("the samples in %s could not be written: %s. The run continues", file, error)
        return file


class _FolderLock:
    """Refuses a second run in a folder.

    lockf and not flock: the lock belongs to this process alone, so a reward worker that outlives a killed run does not
    block the next one. The kernel releases it however the process ends.
    """

    def __init__(self, folder: Path) -> None:
        self._key = (os.getpid(), str(folder.resolve()))
        if self._key in _locked_folders:
            raise VerlError(
                f"the run folder {folder} is already in use by this process: close the other run, or set "
                "trainer.experiment_name or trainer.default_local_dir"
            )
        try:
            self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise VerlError(_cannot_write(folder / ".lock", error, "trainer.default_local_dir")) from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            if not isinstance(error, BlockingIOError | PermissionError):
                advice = "do not start a second run in it"
                logger.warning("the run folder %s cannot be locked (%s): %s", folder, error, advice)
                self._file = -1
                return
            raise VerlError(
                f"the run folder {folder} is in use by another run ({owner}): stop it, or set "
                "trainer.experiment_name or trainer.default_local_dir"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _locked_folders.add(self._key)

    def release(self) -> None:
        if self._file >= 0 and self._key[0] == os.getpid():
            os.ftruncate(self._file, 0)  # no owner: `verl view` reads this file
            os.close(self._file)
            self._file = -1
            _locked_folders.discard(self._key)


def locked_by_this_process(folder: Path) -> bool:
    """Closing any descriptor of the lock file would release the lock, so a reader must ask before it opens it."""
    return (os.getpid(), str(folder.resolve())) in _locked_folders


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` atomically, also when the machine stops in the middle."""
    with replacing(path) as draft, open(draft, "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _move_aside(path: Path, name: str) -> Path:
    """Rename it, to the next free name where the target cannot be replaced."""
    target = path.with_name(name)
    number = 1
    while target.is_dir() or (path.is_dir() and target.exists()):
        number += 1
        target = path.with_name(f"{name}-{number}")
    return path.replace(target)


def _remove(files: Iterable[Path]) -> None:
    """Remove files of steps; failing to does not stop the run."""
    for file in files:
        try:
            file.unlink()
        except OSError as error:
            logger.warning("%s, of a step that is written again, could not be removed: %s", file, error)


def _length_up_to(file: Path, step: int) -> int:
    """Bytes before the first line of a later step, or before one that is damaged."""
    length = 0
    with open(file, "rb") as lines:
        for line in lines:
            try:
                if not line.endswith(b"\n") or parse_json(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            length += len(line)
    return length


def _sample_files(folder: Path) -> list[Path]:
    """With those of their tokens, of earlier versions (`.tokens`) too."""
    suffixes = (".jsonl", ".parquet", ".tokens")
    files = (file for file in folder.glob("*") if file.suffix in suffixes and file.stem.isdecimal())
    return [file for file in files if not file.is_dir()]


def profile_files(folder: Path) -> list[tuple[int, int, Path]]:
    """(step, rank, file) of `profile/`, in this order."""
    pattern = re.compile(r"step_(\d{1,15})_rank_(\d{1,9})\.json\.gz")
    matches = ((pattern.fullmatch(file.name), file) for file in folder.glob("profile/*.json.gz"))
    return sorted((int(match[1]), int(match[2]), file) for match, file in matches if match)


def _require_writable(folder: Path, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"verl")
            probe.flush()
    except OSError as error:
        raise VerlError(_cannot_write(folder, error, key)) from None


def _cannot_write(folder: Path, error: OSError, key: str) -> str:
    return f"cannot write to the folder {folder}: {error.strerror or error}. Set {key} to a folder you may write to"


# -- lineage ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """Where a run was forked from; the parent's folder may be gone."""

    parent: str
    """Its folder at the time of the fork."""
    parent_name: str
    """project/experiment"""
    step: int
    """The last step of the parent that the fork continues."""
    overrides: tuple[str, ...]
    time: float


def read_lineage(run: Path) -> Lineage | None:
    """The lineage of a run folder; None where it is no fork, or the file cannot be read."""
    try:
        row = read_json(run / LINEAGE)
        step = row["step"]
        if not isinstance(step, int) or isinstance(step, bool):
            return None
        overrides = tuple(map(str, row["overrides"]))
        return Lineage(str(row["parent"]), str(row["parent_name"]), step, overrides, float(row["time"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
