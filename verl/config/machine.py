"""What a config needs of this machine: devices and optional packages.

GPUs are read from nvidia-smi; torch is asked, and so imported, only where that cannot tell.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verl.config.capabilities import engine_spec, strategy_spec
from verl.config.parallelism import pools, world_size
from verl.config.roles import model_roles
from verl.config.schema import GenerationConfig, OfflineConfig, PPOConfig
from verl.config.sections.trainer import TRACKER_SERVICES
from verl.errors import missing_package
from verl.memory import free_host_bytes

# Names of bf16 instructions in /proc/cpuinfo: x86 first, then Arm.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx10_2", "bf16", "svebf16"}


@dataclass(frozen=True)
class Device:
    """What a rank computes on."""

    kind: str  # cuda or cpu
    name: str
    memory: int | None  # bytes one rank may use; None where that is not known
    count: int = 1  # such devices on this machine; for a CPU the processes that share its memory


def local_device(wanted: str, processes: int = 1) -> Device:
    """The device `trainer.device` means here, for `processes` ranks per node."""
    gpus = _gpus() if wanted in ("auto", "cuda") else []
    if gpus:
        name, memory = gpus[0]
        return Device("cuda", name, memory, len(gpus))
    if wanted == "cuda":
        return Device("cuda", "GPU (none found)", None, 0)
    return Device("cpu", "CPU", free_host_bytes() // processes, processes)


def on_cpu(cfg: PPOConfig | OfflineConfig | GenerationConfig) -> bool:
    """Whether the config computes on CPUs here."""
    if cfg.trainer.device != "auto":
        return cfg.trainer.device == "cpu"
    if sum(pool.processes for pool in pools(cfg)) > 1:
        return False  # several processes are on GPUs unless the CPU is named
    return local_device("auto").kind == "cpu"


@cache
def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 instructions, without which torch's bf16 products are many times slower than float32;
    True where that is not known."""
    try:
        if sys.platform == "darwin":
            query = ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]
            return subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.strip() != "0"
        return bf16_in(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except (OSError, subprocess.SubprocessError):
        return True


def bf16_in(cpuinfo: str) -> bool:
    """Whether the flags of /proc/cpuinfo name bf16 instructions; True where there are no flags."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = [set(names.split()) for name, _, names in lines if name.strip().lower() in ("flags", "features")]
    return not flags or any(_BF16_FLAGS & names for names in flags)


def _gpus() -> list[tuple[str, int]]:
    """Name and bytes of each GPU the process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
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
    return parse_gpus(answer, visible)


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
        values = [value.strip() for value in line.split(",")]
        if len(values) == 3 and values[2].isdigit():
            found[values[0]] = (values[1], int(values[2]) * 2**20)
    if visible is None:
        return list(found.values())
    chosen = [number.strip() for number in visible.split(",")]
    if all(number in found for number in chosen):
        return [found[number] for number in chosen]
    if any(name.startswith("MIG-") for name in chosen) and found:
        return [next(iter(found.values())) for _ in chosen]  # slices of a GPU, which are not listed
    return list(found.values())[: len(chosen)]  # named by UUID


def joins_cluster() -> bool:
    """Whether a run would join a Ray cluster, whose nodes are not known here; otherwise it starts one on this node."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        return address != "local"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return True
    if importlib.util.find_spec("ray") is None:
        return False
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:  # the address `ray start` has written, if that cluster is still running
        address = (Path(temporary) / "ray" / "ray_current_cluster").read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def machine_errors(
    cfg: PPOConfig | OfflineConfig | GenerationConfig, device: Device | None = None
) -> list[str]:
    """Why this machine cannot run the processes of a config; empty where a cluster decides that."""
    wanted = pools(cfg)
    launched = isinstance(cfg, OfflineConfig) and started_by_torchrun()
    if not launched and joins_cluster():
        return []
    several = [pool for pool in wanted if pool.nodes > 1]
    if several and not launched:
        key = several[0].key
        return [
            f"'{key}.nnodes' is {several[0].nodes}, but no Ray cluster is running here and RAY_ADDRESS is not set. Run "
            f"`ray start --head`, on the other nodes `ray start --address=HEAD:6379`, or set {key}.nnodes=1"
        ]
    if cfg.trainer.device == "cpu" or sum(pool.processes for pool in wanted) == 1:
        return []
    device = device or local_device(cfg.trainer.device, cfg.trainer.n_gpus_per_node)
    there = device.count if device.kind == "cuda" else 0
    gpus = sum(pool.per_node for pool in wanted)
    if there >= gpus:
        return []
    asked = " and ".join(pool.asked for pool in wanted)
    if there:
        keys = " or ".join(f"{pool.key}.n_gpus_per_node" for pool in wanted)
        return [f"{asked}: {gpus} GPUs are asked for, but this machine has {there} GPUs. Lower {keys}"]
    return [
        f"{asked}: {gpus} GPUs are asked for, but there is no GPU on this machine. Set trainer.device=cpu for as many "
        "CPU processes, or trainer.n_gpus_per_node=1 for one process"
    ]


def missing_packages(config: PPOConfig | OfflineConfig) -> list[str]:
    """A line for each package that is needed and not installed: what needs it and how to install it."""
    return [
        str(missing_package(strategy_spec(name).package or engine_spec(name).package or name, name, why))
        for name, why in needed_packages(config).items()
        if not _installed(strategy_spec(name).module or name)
    ]


def attention_errors(config: PPOConfig | OfflineConfig, device: Device) -> list[str]:
    """Where `attention_backend` names a kernel that this machine cannot have; a cluster's nodes are not known here."""
    lines = []
    for role in model_roles(config):
        name, key = role.model.attention_backend, f"'{role.model_key}.attention_backend'"
        if name in ("auto", "sdpa") or f"{role.model_key}.attention_backend" not in config.user_set:
            continue
        from verl import requirements

        package = requirements.ATTENTION_PACKAGES.get(name)
        if device.kind == "cpu":
            lines.append(
                f"{key} is {name}, which computes on GPUs only, and the run is on CPUs; leave it out"
            )
        elif package and not joins_cluster() and not requirements.attention_package_installed(name):
            lines.append(f"{key} is {name}: {requirements.missing_attention(name)}; or leave it out")
        elif name != "flex" and role.model.dtype == "float32":
            lines.append(
                f"{key} is {name}, which has no float32; leave it out, or set {role.model_key}.dtype=bfloat16"
            )
    return list(dict.fromkeys(lines))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around the module
        return False


def needed_packages(config: PPOConfig | OfflineConfig) -> dict[str, str]:
    """The extras whose packages a run with this config imports, each with the setting that asks for it."""
    found = {name: f"trainer.logger={name}" for name in config.trainer.logger if name in TRACKER_SERVICES}
    for role in reversed(model_roles(config)):
        strategy = role.section.strategy
        if strategy_spec(strategy).package:
            found[strategy] = f"{role.key}.strategy={strategy}"
    launched = isinstance(config, OfflineConfig) and started_by_torchrun()
    for pool in reversed(pools(config)):
        if (pool.key != "trainer" or world_size(config) > 1) and not launched:
            found["ray"] = pool.asked
    if isinstance(config, PPOConfig):
        policy = config.actor_rollout_ref
        if engine_spec(policy.rollout.name).package:
            found[policy.rollout.name] = f"actor_rollout_ref.rollout.name={policy.rollout.name}"
    for role in model_roles(config):
        if role.model.lora_rank > 0:
            found["peft"] = f"{role.model_key}.lora_rank={role.model.lora_rank}"
    return found
