"""Memory of the host and of GPUs: the one reader for every budget. Imports torch only when asked about a GPU."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)  # v2, v1


def free_host_bytes() -> int:
    """Bytes this process can still allocate: what the system has available, within the limits of its cgroups."""
    free = int(psutil.virtual_memory().available)
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return free
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            group = _CGROUPS / controllers / path.lstrip("/")
            inside = [each for each in (group, *group.parents) if each.is_relative_to(_CGROUPS)]
            free = min([free, *(free_in_cgroup(each, free) for each in inside)])
    return free


def host_memory_limit() -> int:
    """Bytes this process could have at most: the machine's memory, or less in a container."""
    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # v2, v1
        with suppress(OSError, ValueError):
            total = min(total, int((_CGROUPS / name).read_text()))
    return total


def free_in_cgroup(group: Path, otherwise: int) -> int:
    """What a cgroup may still allocate; cached files do not count, since the kernel drops them when needed."""
    for names in _CGROUP_FILES:
        try:
            limit, used = (int((group / name).read_text()) for name in names)
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # there is no such file, or the limit is "max"
            continue
        return max(limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0))), 0)
    return otherwise


def free_device_bytes(device: torch.device | str | int | None = None) -> int:
    """Bytes of a CUDA device that no process has allocated, not counting what torch keeps cached for reuse."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Device or host: torch has its own class on devices and a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
