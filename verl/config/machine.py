"""The processes a config asks for, and whether this machine has a place for each of them."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from verl.config.device import Device, device_at_hand
from verl.config.generation import engine_size as engine_places
from verl.config.pools import engine_size, rollout_pool
from verl.config.schema import GenerationConfig, PPOConfig, SFTConfig

ROLLOUT = "actor_rollout_ref.rollout"
REWARD_MODEL = "reward.reward_model"


@dataclass(frozen=True)
class Pool:
    """Processes that are placed together: so many on each of so many nodes, and the section whose keys say so."""

    key: str
    nodes: int
    per_node: int
    places: int = 1
    """What one process takes of them: engines that share a model out over several GPUs are one process each."""

    @property
    def processes(self) -> int:
        return self.nodes * self.per_node // self.places

    @property
    def asked(self) -> str:
        """The keys and their values."""
        return f"{self.key}.nnodes={self.nodes} {self.key}.n_gpus_per_node={self.per_node}"


def pools(cfg: PPOConfig | SFTConfig | GenerationConfig) -> list[Pool]:
    """Everything a run has processes for: the trainer's ranks, and what has GPUs (or CPU processes) of its own."""
    found = [Pool("trainer", cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node)]
    if isinstance(cfg, SFTConfig):
        return found
    if isinstance(cfg, GenerationConfig):
        return [replace(found[0], places=engine_places(cfg))]
    rollout, model = cfg.actor_rollout_ref.rollout, cfg.reward.reward_model
    if rollout_pool(cfg):
        found.append(Pool(ROLLOUT, rollout.nnodes, rollout.n_gpus_per_node, engine_size(cfg)))
    if model.enable and model.n_gpus_per_node:
        found.append(Pool(REWARD_MODEL, model.nnodes, model.n_gpus_per_node))
    return found


def on_cpu(cfg: PPOConfig | SFTConfig | GenerationConfig) -> bool:
    """Whether the config computes on CPUs here."""
    if cfg.trainer.device != "auto":
        return cfg.trainer.device == "cpu"
    if sum(pool.processes for pool in pools(cfg)) > 1:
        return False  # several processes are on GPUs unless the CPU is named
    return device_at_hand("auto").kind == "cpu"


def joins_cluster() -> bool:
    """Whether a run would join a Ray cluster, whose nodes this process does not know; otherwise it starts one here."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        return address != "local"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return True
    if importlib.util.find_spec("ray") is None:
        return False
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return _answers(Path(temporary) / "ray" / "ray_current_cluster")


def _answers(file: Path) -> bool:
    """Whether the cluster whose address `ray start` left in a file is still there."""
    try:
        host, _, port = file.read_text(encoding="utf-8").strip().rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def beyond_machine(cfg: PPOConfig | SFTConfig | GenerationConfig, device: Device | None = None) -> list[str]:
    """Why this machine has no place for the processes the config asks for; empty where a cluster decides that."""
    wanted = pools(cfg)
    launched = isinstance(cfg, SFTConfig) and started_by_torchrun()
    if not launched and joins_cluster():
        return []
    processes = sum(pool.processes for pool in wanted)
    several = [pool for pool in wanted if pool.nodes > 1]
    if several and not launched:
        key = several[0].key
        return [
            f"'{key}.nnodes' is {several[0].nodes}, but no Ray cluster is running here and RAY_ADDRESS is not set: "
            f"there is this one node. Start a cluster (ray start --head; on the others ray start --address=HEAD:6379) "
            f"and set RAY_ADDRESS, or set {key}.nnodes=1"
        ]
    if cfg.trainer.device == "cpu" or processes == 1:
        return []
    device = device or device_at_hand(cfg.trainer.device, cfg.trainer.n_gpus_per_node)
    there = device.count if device.kind == "cuda" else 0
    gpus = sum(pool.per_node for pool in wanted)
    if there >= gpus:
        return []
    asked = " and ".join(pool.asked for pool in wanted)
    if not there:
        return [
            f"{asked}: {gpus} GPUs are asked for, but there is no GPU on this machine. "
            "For as many CPU processes set trainer.device=cpu; for one process trainer.n_gpus_per_node=1"
        ]
    return [
        f"{asked}: {gpus} GPUs are asked for on one node, but this machine has {there} GPUs. Lower "
        f"{' or '.join(f'{pool.key}.n_gpus_per_node' for pool in wanted)}"
    ]
