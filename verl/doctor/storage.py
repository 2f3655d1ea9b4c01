"""Probes of places for files: shared memory, the disk of the run folders, and what dead runs left behind.

Each probe reads the machine and hands the numbers to a `judge_...` function, which is pure.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from verl.doctor.finding import Finding, size

_GIB, _MIB = 2**30, 2**20
_HANDOVER = 512 * _MIB
"""Two buckets of 256 MiB: what a hand-over of weights keeps in shared memory."""
_WRITTEN = 32 * _MIB
_OWNED = re.compile(r"verl-[a-z]+-\w+-([0-9a-f]+)-[0-9a-f]+-[0-9a-f]+")
"""`verl-<kind>-<place>-<process>-<start>-<random>`, as `verl.rollout.weight_sync.stale_files` names its folders."""
LEFTOVER_PATTERNS = ("/tmp/verl-*", "/dev/shm/verl-*")


def shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    try:
        found = os.statvfs(path)
    except OSError as error:
        yield Finding(
            "shared memory",
            "warning",
            f"{path}: {error.strerror}",
            "several processes then hand over through the disk, which is slow",
            f"mount a tmpfs at {path}",
        )
        return
    free = found.f_bavail * found.f_frsize
    yield judge_shared_memory(path, found.f_blocks * found.f_frsize, free, os.access(path, os.W_OK))


def judge_shared_memory(path: str, total: int, free: int, writable: bool = True) -> Finding:
    seen = f"{path}: {size(free)} free of {size(total)}"
    data = {"total": total, "free": free}
    if not writable:
        return Finding(
            "shared memory",
            "warning",
            f"{seen}, not writable",
            "weights are handed over through the disk",
            f"chmod 1777 {path}",
            data=data,
        )
    if total < _GIB:
        return Finding(
            "shared memory",
            "warning",
            seen,
            "too small for several processes (Ray, vLLM, data workers): they die with 'bus error'",
            "docker run --shm-size=16g ..., or mount -o remount,size=16g /dev/shm",
            data=data,
        )
    if free < _HANDOVER:
        return Finding(
            "shared memory",
            "warning",
            seen,
            f"a hand-over of weights to vLLM or SGLang needs {size(_HANDOVER)}",
            f"look for files of dead programs: ls -lt {path}",
            data=data,
        )
    return Finding("shared memory", "ok", seen, data=data)


def disk(folder: str) -> Iterator[Finding]:
    """Where run folders go: room, permission, and how fast a file is safely there."""
    place = Path(folder).expanduser().absolute()
    while not place.is_dir() and place.parent != place:
        place = place.parent
    try:
        found = os.statvfs(place)
        free = found.f_bavail * found.f_frsize
        speed = write_speed(place) if free > 4 * _WRITTEN else None
    except OSError as error:
        yield Finding(
            "disk",
            "fatal",
            f"cannot write to {place}: {error.strerror or error}",
            f"run folders would go to {folder}",
            "set trainer.default_local_dir to a folder you may write",
        )
        return
    yield judge_disk(str(place), free, found.f_blocks * found.f_frsize, speed)


def write_speed(folder: Path, count: int = _WRITTEN) -> float:
    """Bytes per second of writing a file until it is on the disk."""
    block = os.urandom(_MIB)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".verl-doctor-") as file:
        began = time.perf_counter()
        for _ in range(count // _MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return count / max(time.perf_counter() - began, 1e-9)


def judge_disk(place: str, free: int, total: int, speed: float | None) -> Finding:
    data = {"free": free, "total": total, "bytes_per_second": speed}
    seen = f"{place}: {size(free)} free of {size(total)}"
    if speed is None or free < _GIB:
        return Finding(
            "disk",
            "fatal",
            seen,
            "there is no room for a checkpoint",
            "free some space, or set trainer.default_local_dir to another disk",
            data=data,
        )
    kind = next(
        word
        for bound, word in ((500, "fast"), (100, "usual"), (20, "slow"), (0, "very slow"))
        if speed / 1e6 >= bound
    )
    seen += f", writes {speed / 1e6:.0f} MB/s ({kind})"
    if free < 10 * _GIB:
        return Finding(
            "disk",
            "warning",
            seen,
            "a checkpoint with optimiser takes about 16 bytes per parameter: 8 GB for 0.5B",
            "trainer.max_actor_ckpt_to_keep=1, or trainer.default_local_dir on another disk",
            data=data,
        )
    if kind == "very slow":
        return Finding(
            "disk",
            "warning",
            seen,
            "checkpoints will hold training up",
            "trainer.default_local_dir on a local disk, actor_rollout_ref.actor.checkpoint.async_save=True",
            data=data,
        )
    return Finding("disk", "ok", seen, data=data)


def leftovers(patterns: tuple[str, ...] | list[str] = LEFTOVER_PATTERNS) -> Iterator[Finding]:
    """Files of runs that were killed; only reported. What a living process owns is none."""
    found = [path for pattern in patterns for path in glob.glob(pattern) if not in_use(path)]
    total, oldest = 0, time.time()
    for path in found:
        with contextlib.suppress(OSError):
            oldest = min(oldest, os.lstat(path).st_mtime)
        total += folder_size(path)
    yield judge_leftovers(found, total, time.time() - oldest)


def in_use(path: str) -> bool:
    """Whether the name says whose it is, and that process is alive; our own probes' files are in use, too."""
    name = os.path.basename(path)
    owner = _OWNED.fullmatch(name)
    return name.startswith("verl-doctor-") or (
        owner is not None and os.path.exists(f"/proc/{int(owner[1], 16)}")
    )


def folder_size(path: str) -> int:
    total = 0
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return os.lstat(path).st_size
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def judge_leftovers(paths: list[str], total: int, age_s: float) -> Finding:
    if not paths:
        return Finding("leftovers", "ok", "no files of dead runs")
    kinds = sorted({re.sub(r"(/verl-[a-z]*)[^/]*$", r"\1*", path) for path in paths})
    shown = " ".join(kinds[:4]) + (" ..." if len(kinds) > 4 else "")
    seen = f"{len(paths)} left, {size(total)}, the oldest {age_s / 3600:.0f} h old: {shown}"
    return Finding(
        "leftovers",
        "warning" if total > _GIB else "note",
        seen,
        "runs that were killed left them, or one that is running now made them",
        "the next run that makes such files removes those of dead ones; by hand, with no run alive: rm -r "
        + " ".join(kinds),
        data={"paths": paths[:100], "bytes": total},
    )
