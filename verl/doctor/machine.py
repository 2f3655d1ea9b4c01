"""Probes of the machine: cores, memory, shared memory, disk, limits, sandbox, the Hugging Face hub.

Each probe reads the machine and passes the numbers to a pure `judge_...` function where there is something to judge.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from verl.doctor.finding import Finding, size

_GIB = 2**30
_SYNC_BUFFERS = 512 * 2**20
"""Two buckets of 256 MiB: what a weight sync keeps in shared memory."""


def cores() -> Iterator[Finding]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield judge_cores(affinity, cpu_quota(), os.environ.get("OMP_NUM_THREADS", ""), os.getloadavg()[0])


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """The CPU limit of a container in cores; None without one."""
    try:
        limit, period = Path(root, "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def judge_cores(affinity: int, quota: float | None, threads: str, load: float) -> Finding:
    usable = max(1, min(affinity, int(quota) if quota is not None else affinity))
    wanted = int(threads.split(",")[0]) if threads.split(",")[0].isdigit() else affinity
    seen = f"{usable} usable of {affinity}, load {load:.1f}"
    if not 1 <= wanted <= usable:
        seen += f": torch would start {wanted} threads"
        return Finding("cpu cores", "warning", seen, f"export OMP_NUM_THREADS={usable}")
    if load > 1.5 * usable:
        return Finding("cpu cores", "warning", f"{seen}: other programs use this machine", "top")
    return Finding("cpu cores", "ok", seen, data={"usable": usable, "load": load})


def memory() -> Iterator[Finding]:
    import psutil

    found = psutil.virtual_memory()
    limit, used = cgroup_memory()
    total, free = found.total, found.available
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    yield judge_memory(total, free)


def cgroup_memory(root: str = "/sys/fs/cgroup") -> tuple[int | None, int]:
    """(limit, in use) of a container; (None, 0) without a limit."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(root, "memory.max").read_text()), int(Path(root, "memory.current").read_text())
    return None, 0


def judge_memory(total: int, free: int) -> Finding:
    seen = f"{size(free)} free of {size(total)}"
    if free < 2 * _GIB:
        fix = "end other programs; `verl train --check key=value ...` estimates what a run needs"
        return Finding("memory", "warning", f"{seen}: loading a model may be killed", fix)
    return Finding("memory", "ok", seen, data={"total": total, "free": free})


def shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    try:
        found = os.statvfs(path)
    except OSError as error:
        slow = f"{path}: {error.strerror}; processes then exchange weights through the disk"
        yield Finding("shared memory", "warning", slow, f"mount a tmpfs at {path}")
        return
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    yield judge_shared_memory(path, total, free, os.access(path, os.W_OK))


def judge_shared_memory(path: str, total: int, free: int, writable: bool = True) -> Finding:
    seen, name = f"{path}: {size(free)} free of {size(total)}", "shared memory"
    if not writable:
        return Finding(
            name, "warning", f"{seen}, not writable: weights go through the disk", f"chmod 1777 {path}"
        )
    if total < _GIB:
        small = f"{seen}: too small for several processes (Ray, vLLM), which die with 'bus error'"
        return Finding(
            name, "warning", small, f"docker run --shm-size=16g ..., or mount -o remount,size=16g {path}"
        )
    if free < _SYNC_BUFFERS:
        full = f"{seen}: a weight sync to vLLM or SGLang needs {size(_SYNC_BUFFERS)}"
        return Finding(name, "warning", full, f"look for files of dead programs: ls -lt {path}")
    return Finding(name, "ok", seen, data={"total": total, "free": free})


def disk(folder: str) -> Iterator[Finding]:
    """Free space and write permission where run folders go."""
    path = Path(folder).expanduser().absolute()
    while not path.is_dir() and path.parent != path:
        path = path.parent
    try:
        found = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**20))
    except OSError as error:
        seen = f"run folders go to {folder}, but {path} cannot be written: {error.strerror or error}"
        yield Finding("disk", "fatal", seen, "trainer.default_local_dir=FOLDER on a disk you may write")
        return
    yield judge_disk(str(path), found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def judge_disk(place: str, free: int, total: int) -> Finding:
    seen = f"{place}: {size(free)} free of {size(total)}"
    if free < 10 * _GIB:
        fix = "trainer.default_local_dir on another disk, or trainer.max_actor_ckpt_to_keep=1"
        needs = "a checkpoint with optimizer state takes about 16 bytes per parameter"
        return Finding("disk", "fatal" if free < _GIB else "warning", f"{seen}: {needs}", fix)
    return Finding("disk", "ok", seen, data={"total": total, "free": free})


def limits() -> Iterator[Finding]:
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield judge_limits(None if files == resource.RLIM_INFINITY else files)


def judge_limits(files: int | None) -> Finding:
    """None means unlimited."""
    if files is not None and files < 4096:
        seen = f"{files} open files: Ray and reward workers need more"
        return Finding("limits", "warning", seen, "ulimit -n 65536")
    return Finding("limits", "ok", f"{'unlimited' if files is None else files} open files")


def sandbox() -> Iterator[Finding]:
    """Whether model-written code can run in isolation, by running some."""
    from verl.reward.sandbox.local import describe, remedy, why_unavailable

    problem = why_unavailable()
    if problem is None:
        yield Finding("sandbox", "ok", describe())
    else:
        seen = f"{problem}; rewards that run model-written code are refused"
        yield Finding("sandbox", "warning", seen, f"{remedy()}, or set reward.sandbox_fusion.url=URL")


def hub() -> Iterator[Finding]:
    from verl.config.model_path import hub_error

    variables = dict(os.environ)
    yield judge_hub(variables, hub_error)


def judge_hub(variables: Mapping[str, str], ask: Callable[[str], str | None]) -> Finding:
    """Whether models and datasets named by id could be downloaded."""
    from verl.config.model_path import endpoint, offline

    variable, name = offline(variables), "hugging face"
    if variable:
        return Finding(
            name, "note", f"{variable}=1: only folders and the cache are used", f"unset {variable}"
        )
    scheme, mark, host = endpoint(variables).rpartition("://")
    shown = f"{scheme}{mark}{host.rpartition('@')[2]}"  # without a password
    problem = ask(endpoint(variables))
    if problem == "":
        return Finding(name, "note", f"{shown} was not asked: the proxy is a SOCKS proxy")
    if problem is not None:
        fix = "give models as folders, or set https_proxy or HF_ENDPOINT; HF_HUB_OFFLINE=1 skips the attempts"
        return Finding(name, "warning", f"{shown} cannot be reached: {problem}", fix)
    return Finding(name, "ok", f"{shown} answers")
