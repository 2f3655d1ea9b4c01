"""The run folder: the files a run writes for its user.

    config.yaml              the resolved configuration
    metrics.jsonl            one line per step: {"step": N, name: number, ...}
    health.jsonl             what the health rules found: {"step": N, "rule": name, "line": text}
    rollouts/{step}.jsonl    samples of training
    validation/{step}.jsonl  samples of validation
    crash.txt                cause and fix, when a run ended badly
    metrics.previous.jsonl   of an earlier run, where a new one began in its folder

One process at a time uses a folder. Files are replaced atomically, except `metrics.jsonl` and `health.jsonl`, which
grow: lines of them that a full disk or a kill cut short are skipped by readers and removed on resume.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.config.parallelism import offload_section
from verl.errors import RESUME, ConfigError, VerlError
from verl.observe.jsonl import append_line, dumps, jsonable, kept_lines, read_metrics

logger = logging.getLogger(__name__)

# Record locks belong to a process, so a second user in the same process is refused by this table.
_locked_folders: set[tuple[int, str]] = set()


def default_run_path(project: str, experiment: str) -> Path:
    return Path("checkpoints") / project / experiment


class RunFolder:
    """A run folder, opened for writing and locked until `close`."""

    def __init__(
        self,
        path: Path | str,
        *,
        rollout_dir: Path | str | None = None,
        validation_dir: Path | str | None = None,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self.rollout_dir = Path(rollout_dir).expanduser() if rollout_dir else self.path / "rollouts"
        self.validation_dir = (
            Path(validation_dir).expanduser() if validation_dir else self.path / "validation"
        )
        _require_writable(self.path, "trainer.default_local_dir")
        for folder, key in (
            (self.rollout_dir, "trainer.rollout_data_dir"),
            (self.validation_dir, "trainer.validation_data_dir"),
        ):
            _require_writable(folder, key)
        self._lock = _FolderLock(self.path)
        self._crash_file = self.path / "crash.txt"
        if self._crash_file.exists():
            _move_aside(self._crash_file, "crash.previous.txt")
        for file in (self.metrics_file, self.health_file):
            if file.exists() and not file.is_file():
                aside = _move_aside(file, f"{file.name}.unusable")
                logger.warning("%s is not a regular file; renamed to %s", file, aside.name)

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def health_file(self) -> Path:
        return self.path / "health.jsonl"

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

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        append_line(self.metrics_file, dumps({"step": step, **metrics}))

    def append_health(self, step: int, notices: Mapping[str, str]) -> None:
        """What the rules, by name, reported in a step; a full disk does not stop the run."""
        try:
            for rule, line in notices.items():
                append_line(self.health_file, dumps({"step": step, "rule": rule, "line": line}))
        except OSError as error:
            logger.warning("%s could not be written: %s. The run continues", self.health_file, error)

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.metrics_file)

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        return self._write_rows(self.rollout_dir / f"{step}.jsonl", rows)

    def write_validation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        return self._write_rows(self.validation_dir / f"{step}.jsonl", rows)

    def rewind(self, step: int) -> bool:
        """Remove what came after `step`, which a resumed run writes again; whether the metrics of `step` are there."""
        found = False

        def keep(row: Mapping[str, Any]) -> bool:
            nonlocal found
            found = found or row["step"] == step
            return row["step"] <= step  # type: ignore[no-any-return]

        if self.metrics_file.exists():
            text, changed = kept_lines(self.metrics_file, keep)
            if changed:
                write_atomically(self.metrics_file, text)
        if self.health_file.exists():
            text, changed = kept_lines(self.health_file, lambda row: row["step"] <= step)
            if changed:
                write_atomically(self.health_file, text)
        for folder in (self.rollout_dir, self.validation_dir):
            for file in _sample_files(folder):
                if int(file.stem) > step:
                    _remove(file)
        return found

    def restart(self) -> None:
        """For a run that starts over: rename the metrics of an earlier one and remove its samples."""
        if self.metrics_file.exists() and self.metrics_file.stat().st_size:
            _move_aside(self.metrics_file, "metrics.previous.jsonl")
        if self.health_file.exists():
            _remove(self.health_file)
        for folder in (self.rollout_dir, self.validation_dir):
            if folder.parent != self.path:
                continue  # a folder the user chose may be others' as well
            for file in _sample_files(folder):
                _remove(file)

    def write_crash(self, error: BaseException, fix: str = "") -> None:
        """Cause first, fix second, traceback last."""
        parts = [f"{type(error).__name__}: {error}".rstrip()]
        if fix:
            parts.append(f"What to do: {fix}")
        parts.append(f"When: {time.strftime('%Y-%m-%d %H:%M:%S %Z')}")
        parts.append("".join(traceback.format_exception(error)).rstrip())
        try:
            write_atomically(self._crash_file, "\n\n".join(parts) + "\n")
        except OSError as failed:  # the crash itself matters more than its record
            logger.warning("%s could not be written: %s", self._crash_file, failed)

    def close(self) -> None:
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
            self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise VerlError(_cannot_write(folder / ".lock", error, "trainer.default_local_dir")) from None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            if not isinstance(error, BlockingIOError | PermissionError):
                logger.warning(
                    "the run folder %s cannot be locked (%s): do not start a second run in it", folder, error
                )
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


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` atomically, also when the machine stops in the middle."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _move_aside(path: Path, name: str) -> Path:
    """Rename it, to the next free name where the target cannot be replaced."""
    target = path.with_name(name)
    number = 1
    while target.is_dir() or (path.is_dir() and target.exists()):
        number += 1
        target = path.with_name(f"{name}-{number}")
    return path.replace(target)


def _remove(file: Path) -> None:
    """Remove samples or notices; failing to does not stop the run."""
    try:
        file.unlink()
    except OSError as error:
        logger.warning("%s, of a step that is written again, could not be removed: %s", file, error)


def _sample_files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.jsonl") if file.stem.isdecimal() and not file.is_dir()]


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


# -- the advice in crash.txt -----------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Device or host: torch has its own class on devices and a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def likely_fix(error: BaseException, config: Any = None) -> str:
    """One line, or nothing when the error itself says it (a VerlError does). `config`: the PPOConfig of the run."""
    if isinstance(error, VerlError):
        return ""
    if is_out_of_memory(error) and config is not None:
        return out_of_memory_advice(config)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk is full: free some space, set trainer.default_local_dir to another disk, or keep fewer "
            "checkpoints with trainer.max_actor_ckpt_to_keep=1"
        )
    return f"stopped by hand; {RESUME}" if isinstance(error, KeyboardInterrupt) else RESUME


def out_of_memory_advice(config: Any) -> str:
    """Keys with amounts, those that cost least first."""
    key = "actor_rollout_ref"
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    tokens, sequences = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    steps: list[str] = []
    if actor.use_dynamic_bsz and tokens:
        steps.append(f"{key}.actor.ppo_max_token_len_per_gpu={max(1, tokens // 2)}")
    elif sequences is None or sequences > 1:
        steps.append(f"{key}.actor.ppo_micro_batch_size_per_gpu={max(1, (sequences or 8) // 2)}")
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        steps.append(f"{key}.model.enable_gradient_checkpointing=True")
    section, offload = offload_section(actor)
    if not offload.optimizer_offload:
        steps.append(f"{key}.actor.{section}.optimizer_offload=True")
    elif not offload.param_offload:
        steps.append(f"{key}.actor.{section}.param_offload=True")
    if rollout.gpu_memory_utilization > 0.2:
        lower = max(0.2, round(rollout.gpu_memory_utilization - 0.2, 2))
        steps.append(f"{key}.rollout.gpu_memory_utilization={lower:g}")
    steps.append(f"data.max_response_length={max(1, config.data.max_response_length // 2)}")
    return "out of memory. In this order, until it fits: " + ", then ".join(steps)
