"""Probes of the machine: cores, memory, shared memory, disk, limits, sandbox, the Hugging Face hub.

Each probe reads the machine and passes the numbers to a pure `judge_...` function where there is something to judge.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from verl.doctor.runner import Check, size

_GIB = 2**30
_SYNC_BUFFERS = 512 * 2**20
"""Two buckets of 256 MiB: what a weight sync keeps in shared memory."""


def cores() -> Iterator[Check]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield judge_cores(affinity, cpu_quota(), os.environ.get("OMP_NUM_THREADS", ""), os.getloadavg()[0])


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """The CPU limit of a container in cores; None without one."""
    try:
        limit, period = Path(root, "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def judge_cores(affinity: int, quota: float | None, threads: str, load: float) -> Check:
    usable = max(1, min(affinity, int(quota) if quota is not None else affinity))
    wanted = int(threads.split(",")[0]) if threads.split(",")[0].isdigit() else affinity
    seen = f"{usable} usable of {affinity}, load {load:.1f}"
    if not 1 <= wanted <= usable:
        seen += f": torch would start {wanted} threads"
        return Check("cpu cores", "warning", seen, f"export OMP_NUM_THREADS={usable}")
    if load > 1.5 * usable:
        return Check("cpu cores", "warning", f"{seen}: other programs use this machine", "top")
    return Check("cpu cores", "ok", seen, data={"usable": usable, "load": load})


def memory() -> Iterator[Check]:
    from verl.memory import free_host_bytes, host_memory_limit

    yield judge_memory(host_memory_limit(), free_host_bytes())


def judge_memory(total: int, free: int) -> Check:
    seen = f"{size(free)} free of {size(total)}"
    if free < 2 * _GIB:
        fix = "end other programs; `verl train --check key=value ...` estimates what a run needs"
        return Check("memory", "warning", f"{seen}: loading a model may be killed", fix)
    return Check("memory", "ok", seen, data={"total": total, "free": free})


def shared_memory(path: str = "/dev/shm") -> Iterator[Check]:
    try:
        found = os.statvfs(path)
    except OSError as error:
        slow = f"{path}: {error.strerror}; processes then exchange weights through the disk"
        yield Check("shared memory", "warning", slow, f"mount a tmpfs at {path}")
        return
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    yield judge_shared_memory(path, total, free, os.access(path, os.W_OK))


def judge_shared_memory(path: str, total: int, free: int, writable: bool = True) -> Check:
    seen, name = f"{path}: {size(free)} free of {size(total)}", "shared memory"
    if not writable:
        closed = f"{seen}, not writable: weights go through the disk"
        return Check(name, "warning", closed, f"chmod 1777 {path}")
    if total < _GIB:
        small = f"{seen}: too small for several processes (Ray, vLLM), which die with 'bus error'"
        fix = f"docker run --shm-size=16g ..., or mount -o remount,size=16g {path}"
        return Check(name, "warning", small, fix)
    if free < _SYNC_BUFFERS:
        full = f"{seen}: a weight sync to vLLM or SGLang needs {size(_SYNC_BUFFERS)}"
        return Check(name, "warning", full, f"look for files of dead programs: ls -lt {path}")
    return Check(name, "ok", seen, data={"total": total, "free": free})


def disk(folder: str) -> Iterator[Check]:
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
        yield Check("disk", "fatal", seen, "trainer.default_local_dir=FOLDER on a disk you may write")
        return
    yield judge_disk(str(path), found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def judge_disk(place: str, free: int, total: int) -> Check:
    seen = f"{place}: {size(free)} free of {size(total)}"
    if free < 10 * _GIB:
        fix = "trainer.default_local_dir on another disk, or trainer.max_actor_ckpt_to_keep=1"
        needs = "a checkpoint with optimizer state takes about 16 bytes per parameter"
        return Check("disk", "fatal" if free < _GIB else "warning", f"{seen}: {needs}", fix)
    return Check("disk", "ok", seen, data={"total": total, "free": free})


def limits() -> Iterator[Check]:
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    if unlimited or files >= 4096:
        yield Check("limits", "ok", f"{'unlimited' if unlimited else files} open files")
    else:
        seen = f"{files} open files: Ray and reward workers need more"
        yield Check("limits", "warning", seen, "ulimit -n 65536")


def sandbox() -> Iterator[Check]:
    """Whether model-written code can run in isolation, by running some."""
    from verl.reward.sandbox.local import describe, remedy, why_unavailable

    problem = why_unavailable()
    if problem is None:
        yield Check("sandbox", "ok", describe())
    else:
        seen = f"{problem}; rewards that run model-written code are refused"
        yield Check("sandbox", "warning", seen, f"{remedy()}, or set reward.sandbox_fusion.url=URL")


def hub() -> Iterator[Check]:
    from verl.config.model_path import hub_error

    yield judge_hub(os.environ, hub_error)


def judge_hub(variables: Mapping[str, str], ask: Callable[[str], str | None]) -> Check:
    """Whether models and datasets named by id could be downloaded."""
    from verl.config.model_path import endpoint, offline

    variable, name = offline(variables), "hugging face"
    if variable:
        return Check(name, "note", f"{variable}=1: only folders and the cache are used", f"unset {variable}")
    scheme, mark, host = endpoint(variables).rpartition("://")
    shown = f"{scheme}{mark}{host.rpartition('@')[2]}"  # without a password
    problem = ask(endpoint(variables))
    if problem == "":
        return Check(name, "note", f"{shown} was not asked: the proxy is a SOCKS proxy")
    if problem is not None:
        fix = "give models as folders, or set https_proxy or HF_ENDPOINT; HF_HUB_OFFLINE=1 skips the attempts"
        return Check(name, "warning", f"{shown} cannot be reached: {problem}", fix)
    return Check(name, "ok", f"{shown} answers")
