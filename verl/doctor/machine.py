"""Probes of the machine: cores, memory, limits, name, clock, sandbox.

Each probe reads the machine and hands the numbers to a `judge_...` function, which is pure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.doctor.finding import Finding, size

_GIB, _MIB = 2**30, 2**20


def cores() -> Iterator[Finding]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    yield judge_cores(affinity, cpu_quota(), dict(os.environ), load)


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """Cores' worth of time a container may use; None without a limit."""
    try:
        limit, period = Path(root, "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_v1 = int(Path(root, "cpu/cpu.cfs_quota_us").read_text())
        return limit_v1 / int(Path(root, "cpu/cpu.cfs_period_us").read_text()) if limit_v1 > 0 else None
    except (OSError, ValueError):
        return None


def judge_cores(affinity: int, quota: float | None, variables: Mapping[str, str], load: float) -> Finding:
    """Threads beyond the cores wait for each other at every small product, which is slower than fewer."""
    usable = max(1, min(affinity, int(quota) if quota is not None else affinity))
    limited = (
        f" (a container may use {quota:g} of {affinity})" if quota is not None and quota < affinity else ""
    )
    text = variables.get("OMP_NUM_THREADS", "")
    threads = f", OMP_NUM_THREADS={text}" if text else ""
    seen = f"{usable} usable{limited}{threads}, load {load:.1f}"
    data = {"usable": usable, "quota": quota, "affinity": affinity, "load": load}
    if text and (not text.split(",")[0].isdigit() or int(text.split(",")[0]) < 1):
        return Finding(
            "cpu cores",
            "warning",
            seen,
            "that is not a number of threads",
            f"export OMP_NUM_THREADS={usable}",
            data=data,
        )
    if text and int(text.split(",")[0]) > usable:
        return Finding(
            "cpu cores",
            "warning",
            seen,
            "more threads than cores: they wait for each other",
            f"export OMP_NUM_THREADS={usable}",
            data=data,
        )
    if limited and not text:
        return Finding(
            "cpu cores",
            "warning",
            seen,
            f"torch would start {affinity} threads for {usable} cores",
            f"export OMP_NUM_THREADS={usable}",
            data=data,
        )
    if load > 1.5 * usable:
        return Finding(
            "cpu cores",
            "warning",
            seen,
            "other programs use this machine: runs will be slow",
            "top",
            data=data,
        )
    return Finding("cpu cores", "ok", seen, data=data)


def memory() -> Iterator[Finding]:
    values = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    total = values.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = values.get("MemAvailable", total)
    limit, used = cgroup_memory()
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - used))
    yield judge_memory(total, available)


def cgroup_memory(root: str = "/sys/fs/cgroup") -> tuple[int | None, int]:
    """(limit, in use) of a container; (None, 0) without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(root, limit).read_text()), int(Path(root, used).read_text())
    return None, 0


def judge_memory(total: int, available: int) -> Finding:
    seen = f"{size(available)} free of {size(total)}"
    data = {"total": total, "available": available}
    if available < 2 * _GIB:
        return Finding(
            "memory",
            "warning",
            seen,
            "a run of even a small model needs some: loading may be killed",
            "end other programs; see `verl train --check key=value ...` for what a run needs",
            data=data,
        )
    return Finding("memory", "ok", seen, data=data)


def limits() -> Iterator[Finding]:
    import resource

    found = {}
    for name in ("NOFILE", "MEMLOCK", "NPROC"):
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            value = resource.getrlimit(number)[0]
            found[name] = None if value == resource.RLIM_INFINITY else value
    yield judge_limits(found, Path("/dev/infiniband").exists())


def judge_limits(found: Mapping[str, int | None], infiniband: bool = False) -> Finding:
    """None means unlimited."""
    files, locked, processes = found.get("NOFILE"), found.get("MEMLOCK"), found.get("NPROC")

    def shown(value: int | None, in_bytes: bool = False) -> str:
        return "unlimited" if value is None else size(value) if in_bytes else str(value)

    seen = f"{shown(files)} open files, {shown(locked, True)} locked memory, {shown(processes)} processes"
    data = dict(found)
    if files is not None and files < 4096:
        return Finding(
            "limits",
            "warning",
            seen,
            "Ray and many reward workers need more open files",
            "ulimit -n 65536",
            data=data,
        )
    if processes is not None and processes < 1024:
        return Finding(
            "limits",
            "warning",
            seen,
            "threads count as processes: starting them may fail",
            "ulimit -u 65536",
            data=data,
        )
    if infiniband and locked is not None and locked < 64 * _MIB:
        return Finding(
            "limits",
            "warning",
            seen,
            "NCCL over InfiniBand registers memory, which must be lockable",
            "ulimit -l unlimited (docker: --ulimit memlock=-1)",
            data=data,
        )
    return Finding("limits", "ok", seen, data=data)


def hostname(name: str | None = None) -> Iterator[Finding]:
    """Gloo, NCCL and Ray look the machine's own name up."""
    name = name or socket.gethostname()
    try:
        addresses = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield Finding(
            "hostname",
            "warning",
            f"{name!r} has no address: {error}",
            "several processes cannot find each other",
            f"echo '127.0.1.1 {name}' >> /etc/hosts",
        )
        return
    yield Finding("hostname", "ok", f"{name} is {', '.join(addresses[:2])}", data={"addresses": addresses})


def clock(folder: str = ".") -> Iterator[Finding]:
    place = Path(folder).expanduser().absolute()
    while not place.is_dir() and place.parent != place:
        place = place.parent
    on_disk = None
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=place, prefix=".verl-doctor-") as file:
        on_disk = os.stat(file.name).st_mtime
    built = max(p.stat().st_mtime for p in Path(__file__).parent.glob("*.py"))
    yield judge_clock(time.time(), on_disk, built)


def judge_clock(now: float, on_disk: float | None, built: float) -> Finding:
    seen = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < min(built, 1.7e9) - 86_400 or now > 4.1e9:
        return Finding(
            "clock",
            "warning",
            seen,
            "the clock is wrong: certificates and resuming by date fail",
            "timedatectl set-ntp true",
        )
    if on_disk is not None and abs(on_disk - now) > 60:
        return Finding(
            "clock",
            "warning",
            f"{seen}; the disk's clock is {on_disk - now:+.0f} s apart",
            "the newest file may look old",
            "synchronise both machines' clocks (NTP)",
        )
    return Finding("clock", "ok", seen)


def sandbox() -> Iterator[Finding]:
    """Whether code written by a model can be run in isolation, found out by running some."""
    from verl.reward.sandbox.local import availability

    found = availability()
    if found.isolated:
        yield Finding("sandbox", "ok", found.describe())
    else:
        yield Finding(
            "sandbox",
            "warning",
            found.reason,
            "rewards that run model-written code are refused; others do not need it",
            "apt-get install bubblewrap, or reward.sandbox_fusion.url=URL",
        )
