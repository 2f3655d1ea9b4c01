"""The `global_step_N` folders of a run: which there are, which are complete, in use, or to be deleted.

A name without a leading dot was given after everything in the folder was on the disk; names with a leading dot are
unfinished or being deleted and are never loaded. `latest_checkpointed_iteration.txt` is for people and other programs;
nothing here reads it.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from verl.checkpoint.files import lock, remove_folder, replace_file, sync_file
from verl.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify, write_manifest
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"global_steps?_(\d+)")


def step_name(step: int) -> str:
    return f"global_step_{step}"


def step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class StepFolder:
    """A folder named like a checkpoint; without a valid manifest, `problem` says why."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str = ""


def list_steps(run_folder: Path) -> list[StepFolder]:
    """All step folders, newest first. Reads manifests only."""
    found = []
    for path in run_folder.iterdir() if run_folder.is_dir() else ():
        step = step_of(path)
        if step is None or not path.is_dir():
            continue
        try:
            found.append(StepFolder(path, step, read_manifest(path)))
        except CheckpointError as error:
            found.append(StepFolder(path, step, None, str(error)))
    return sorted(found, key=lambda entry: -entry.step)


def problems(entry: StepFolder, parts: Collection[str] = (), *, checksums: bool = True) -> list[str]:
    """Why this folder cannot be resumed from; empty when it can."""
    if entry.manifest is None:
        return [entry.problem]
    if entry.manifest.step != entry.step:
        return [f"its manifest is of step {entry.manifest.step}"]
    absent = [f"it holds no '{part}'" for part in parts if part not in entry.manifest.parts]
    return absent or verify(entry.path, entry.manifest, checksums=checksums)


def newest_complete(
    run_folder: Path, parts: Collection[str] = (), below: int | None = None
) -> StepFolder | None:
    """The newest complete step (before `below`); those skipped are logged with the reason."""
    for entry in list_steps(run_folder):
        if below is not None and entry.step >= below:
            continue
        canonical = entry.path.name == step_name(entry.step)
        found = problems(entry, parts) if canonical else [f"its name is not {step_name(entry.step)}"]
        if not found:
            return entry
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        logger.warning("checkpoint %s is skipped: %.500s%s", entry.path.name, found[0], more)
    return None


def checked_path(path: Path, parts: Collection[str] = ()) -> Path:
    """A checkpoint named by the user: a step folder (or the part inside it), or a run folder (its newest step)."""
    if path.name in ("actor", "critic", "implicit_reward") and not (path / MANIFEST).exists():
        path = path.parent
    if path.is_dir() and not (path / MANIFEST).exists():
        found = newest_complete(path, parts)
        if found is not None:
            return found.path
    manifest = read_manifest(path)
    missing = [part for part in parts if part not in manifest.parts]
    if missing:
        raise CheckpointError(
            f"{path} holds no '{missing[0]}' (it holds: {', '.join(manifest.parts)}): "
            "set trainer.resume_from_path to another checkpoint"
        )
    damage = verify(path, manifest)
    if damage:
        raise CheckpointError(
            f"{path} is damaged: {damage[0]}. Set trainer.resume_from_path to another checkpoint, or "
            "trainer.resume_mode=auto to take the newest complete one"
        )
    return path


def work_folder(run_folder: Path, step: int) -> Path:
    return run_folder / f".{step_name(step)}.tmp"


def publish(work: Path, final: Path) -> None:
    """Give a finished folder its name; an older save of the step is replaced."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(work, final)
    sync_file(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def archive(folder: Path) -> bool:
    """Rename a checkpoint beyond the step this run started from to `global_step_N.earlier`, unless someone is reading
    it; whether it is out of the way."""
    number = 1
    while (name := folder.with_name(f"{folder.name}.earlier{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    with exclusive(folder) as unused:
        if unused and folder.exists():
            os.rename(folder, name)
            sync_file(folder.parent)
            logger.warning("%s is beyond the step this run started from; kept as %s", folder.name, name.name)
        return unused


def write_tracker(run_folder: Path, step: int) -> None:
    replace_file(run_folder / TRACKER, f"{step}\n")


def recover(run_folder: Path) -> None:
    """After a run that was killed: delete unfinished work, restore a checkpoint whose replacement did not finish."""
    if not run_folder.is_dir():
        return
    for path in run_folder.iterdir():
        name, _, kind = path.name[1:].rpartition(".")
        if not path.name.startswith(".global_step_") or kind not in ("tmp", "old", "deleting"):
            continue
        folder = path.is_dir() and not path.is_symlink()
        if kind == "old" and folder and not (run_folder / name).exists():
            os.rename(path, run_folder / name)
            continue
        logger.info("removing %s, left by a run that was killed", path.name)
        if folder:
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Lock the checkpoint against deletion by other processes."""
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be opened as a checkpoint: {error.strerror}") from None
    try:
        lock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Lock the checkpoint against readers; False where there is one."""
    try:
        try:
            descriptor = os.open(folder / MANIFEST, os.O_RDWR | os.O_NONBLOCK)  # as NFS wants it
        except OSError:
            descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        yield True  # not a checkpoint that anyone could be using
        return
    try:
        yield lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def delete(folder: Path, *, wait: bool = True) -> bool:
    """Delete a checkpoint unless someone is reading it; whether it was deleted."""
    with exclusive(folder) as unused:
        if unused:
            remove_folder(folder, wait=wait)
        else:
            logger.info("checkpoint %s is in use and stays for now", folder.name)
        return unused


# -- retention ------------------------------------------------------------------------------------------------------
# The newest complete step, the best one and those in use are kept always; limits count what is on the disk, so they
# hold across restarts. With different limits for actor and critic, a step may keep one of them: it can be merged, but
# not resumed from.


@dataclass(frozen=True)
class RetentionLimits:
    """How many newest steps keep each part (None: all), and the metric whose best step is kept."""

    keep: Mapping[str, int | None]
    best: str | None = None
    best_mode: str = "max"


def best_step(entries: Sequence[StepFolder], metric: str | None, mode: str = "max") -> StepFolder | None:
    """The step whose metric is best; of equals the newest."""
    if metric is None:
        return None
    scored = [
        (e.manifest.metrics[metric], e.step, e)
        for e in entries
        if e.manifest is not None and not math.isnan(e.manifest.metrics.get(metric, math.nan))
    ]
    sign = 1.0 if mode == "max" else -1.0
    return max(scored, key=lambda item: (sign * item[0], item[1]))[2] if scored else None


def beyond_limits(
    entries: Sequence[StepFolder], limits: RetentionLimits, saved: int | None = None
) -> tuple[list[StepFolder], list[tuple[StepFolder, str]]]:
    """Steps to delete, and parts to delete from steps that are kept. `entries` newest first, those without a manifest
    are ignored; the step just `saved` is kept."""
    complete = [e for e in entries if e.manifest is not None]
    protected = {step for step in (complete[0].step if complete else None, saved) if step is not None}
    best = best_step(complete, limits.best, limits.best_mode)
    if best is not None:
        protected.add(best.step)
    steps: list[StepFolder] = []
    parts: list[tuple[StepFolder, str]] = []
    seen: dict[str, int] = {}
    for entry in complete:
        assert entry.manifest is not None
        beyond = []
        for part in entry.manifest.parts:
            seen[part] = seen.get(part, 0) + 1
            limit = limits.keep.get(part)
            if limit is not None and seen[part] > limit:
                beyond.append(part)
        if entry.step in protected or not beyond:
            continue
        if len(beyond) == len(entry.manifest.parts):
            steps.append(entry)
        else:
            parts += [(entry, part) for part in beyond]
    return steps, parts


def apply_limits(run_folder: Path, limits: RetentionLimits, saved: int | None = None) -> list[str]:
    """Delete what is beyond the limits; the names of what was deleted."""
    steps, parts = beyond_limits(list_steps(run_folder), limits, saved)
    deleted = [entry.path.name for entry in steps if delete(entry.path, wait=False)]
    for entry, part in parts:
        if _delete_part(entry, part):
            deleted.append(f"{entry.path.name}/{part}")
    if deleted:
        logger.info("deleted beyond the limits on checkpoints: %s", ", ".join(deleted))
    return deleted


def _delete_part(entry: StepFolder, part: str) -> bool:
    """The manifest first: from then on the part's files do not belong to the checkpoint."""
    assert entry.manifest is not None
    manifest: Manifest = replace(
        entry.manifest,
        parts={name: contents for name, contents in entry.manifest.parts.items() if name != part},
        files={name: r for name, r in entry.manifest.files.items() if not name.startswith(f"{part}/")},
    )
    with exclusive(entry.path) as unused:
        if unused:
            write_manifest(entry.path, manifest, replace=True)
            remove_folder(entry.path / part, wait=False)
        return unused
