"""The device at hand: nvidia-smi for a GPU, /proc/meminfo and /proc/cpuinfo for a CPU.

torch is asked, and so imported, only where there is a GPU and nvidia-smi cannot tell.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """What a rank computes on."""

    kind: str
    """cuda or cpu."""
    name: str
    memory: int | None
    """Bytes one rank may use; None where the machine does not say."""
    count: int = 1
    """Such devices on this machine; for a CPU the processes that share its memory."""


def device_at_hand(wanted: str, processes: int = 1) -> Device:
    """The device `trainer.device` means here, for `processes` ranks per node."""
    gpus = _gpus() if wanted in ("auto", "cuda") else []
    if gpus:
        name, memory = gpus[0]
        return Device("cuda", name, memory, len(gpus))
    if wanted == "cuda":
        return Device("cuda", "GPU (none seen here)", None, 0)
    total = _host_memory()
    return Device("cpu", "CPU", total // processes if total is not None else None, processes)


_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx10_2", "bf16", "svebf16"}
"""Names of bf16 instructions in /proc/cpuinfo: x86 first, then Arm."""


@cache
def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 instructions; True where it does not say. Without them torch's bf16 products are many
    times slower than those in float32."""
    if sys.platform == "darwin":
        return _sysctl("hw.optional.arm.FEAT_BF16") != "0"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return bf16_in(text)


def bf16_in(cpuinfo: str) -> bool:
    """Whether the flags of /proc/cpuinfo name bf16 instructions; True where there are no flags."""
    flags = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if _names_flags(line)]
    return not flags or any(_BF16_FLAGS & set(names) for names in flags)


def _names_flags(line: str) -> bool:
    return line.partition(":")[0].strip().lower() in ("flags", "features")


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _gpus() -> list[tuple[str, int]]:
    """Name and bytes of each GPU the process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    command = shutil.which("nvidia-smi")
    if command is None:
        drivers = ("/dev/nvidiactl", "/dev/kfd")  # NVIDIA's and AMD's
        return _gpus_by_torch() if any(Path(driver).exists() for driver in drivers) else []
    query = [command, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return _gpus_by_torch()
    return parse_gpus(answer, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _gpus_by_torch() -> list[tuple[str, int]]:
    try:
        import torch
    except ImportError:
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(each.name, each.total_memory) for each in properties]


def parse_gpus(answer: str, visible: str | None) -> list[tuple[str, int]]:
    """The GPUs nvidia-smi lists, in the order of CUDA_VISIBLE_DEVICES where that names them by number."""
    found: dict[str, tuple[str, int]] = {}
    for line in answer.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[2].isdigit():
            found[parts[0]] = (parts[1], int(parts[2]) * 2**20)
    if visible is None:
        return list(found.values())
    chosen = [number.strip() for number in visible.split(",")]
    if all(number in found for number in chosen):
        return [found[number] for number in chosen]
    if any(name.startswith("MIG-") for name in chosen) and found:
        return [next(iter(found.values())) for _ in chosen]  # parts of a GPU, which are not listed
    return list(found.values())[: len(chosen)]  # named by UUID: as many as are named


def _host_memory() -> int | None:
    """Bytes a process can still get."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
