"""One training rank on several processes: its shard of every engine, and the calls the driver sends it.

Every rank gets the same calls in the same order, because sharded weights are gathered by collectives; only generation
between `open_generation` and `close_generation` runs at each rank's own pace, on gathered weights.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from verl.checkpoint import CheckpointManager
from verl.observe.metrics import Metric
from verl.rollout.weight_sync.broadcast import SENDER, Broadcast
from verl.rollout.weight_sync.fingerprint import Manifest
from verl.workers.generation_stream import RolloutServer
from verl.workers.rank_group import RankGroup
from verl.workers.rpc_server import RPCServer
from verl.workers.shard_batch import Arrays, from_arrays, to_arrays

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.models.weight_source import SourceLogProbs
    from verl.rollout.base import RolloutEngine
    from verl.rollout.model_info import ModelInfo

Config = TypeVar("Config")
_SIOCGIFADDR = 0x8915  # Linux


@dataclass
class RankSetup(Generic[Config]):
    """What every rank is built from; `Config` is that of the command (PPOConfig, SFTConfig, GenerationConfig)."""

    cfg: Config
    tokenizer: Any
    training_steps: int
    run_folder: Path
    store: tuple[str, int] | None = None
    """Address of rank 0's store; None: a single rank."""
    threads: int | None = None
    """Of a CPU rank; None: torch's default."""
    one_host: bool = True
    search_path: tuple[str, ...] = ()
    """The driver's `sys.path`, for plugins."""
    folder: str = ""
    """The driver's working directory, for relative paths in the config."""
    model: nn.Module | None = None
    devices: tuple[str, ...] = ()
    """The GPU each rank sees, by rank."""


def prepare_process(setup: RankSetup[Any], address: str) -> None:
    """Before a model is loaded: module paths, plugins, threads, and gloo's network interface for `address`."""
    from verl.config.load import import_plugins
    from verl.runtime import quiet_transformers

    quiet_transformers()
    sys.path += [folder for folder in setup.search_path if folder not in sys.path]
    if os.path.isdir(setup.folder):
        os.chdir(setup.folder)
    import_plugins(setup.cfg)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    use_interface_of("127.0.0.1" if setup.one_host else address)


def use_interface_of(address: str) -> None:
    """By default gloo takes the address of the host's name, which others often cannot reach."""
    interface = interface_of(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def collective_timeout_s(watchdog_s: float) -> float:
    """Longer than the watchdog, which reports who waits for whom; this is for when the watchdog itself is gone."""
    return 2 * watchdog_s + 60


def join_process_group(store: Any, rank: int, world_size: int, *, device: str, watchdog_s: float) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout_s(watchdog_s)),
    )


def interface_of(address: str) -> str | None:
    """The network interface that carries an IPv4 address; None where it cannot be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class JoinedRank(RPCServer):
    """A rank that joins the others in a process group."""

    _store: Any = None

    def do_open_store(self, address: str) -> tuple[str, int]:
        """On rank 0: the store, on a free port of this address only."""
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            address,
            port,
            self.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return address, port

    def join(self, setup: RankSetup[Any]) -> None:
        """Prepare this process and join the process group."""
        from verl.runtime import seed_everything

        prepare_process(setup, self.address)
        trainer = setup.cfg.trainer
        if self.world_size > 1:
            if self._store is None:
                assert setup.store is not None
                self._store = dist.TCPStore(*setup.store, self.world_size, is_master=False)
            join_process_group(
                self._store,
                self.rank,
                self.world_size,
                device=trainer.device,
                watchdog_s=trainer.watchdog_s,
            )
        seed_everything(trainer.seed)


class TrainRank(JoinedRank, RolloutServer):
    """One rank of reinforcement learning: all roles, and a rollout engine where there is one."""

    _group: RankGroup | None = None
    _checkpoints: CheckpointManager | None = None
    _broadcast: Broadcast | None = None

    @property
    def group(self) -> RankGroup:
        assert self._group is not None
        return self._group

    def do_build(self, setup: RankSetup[PPOConfig]) -> None:
        """Join the process group and load this rank's shard of the models."""
        self.join(setup)
        self._group = RankGroup(setup, self.rank)
        self._checkpoints = CheckpointManager.from_config(setup.cfg, setup.run_folder)
        self._tokenizer = setup.tokenizer

    def rollout_engine(self) -> RolloutEngine:
        return self.group.rollout.engine

    def weights_version(self) -> int:
        return self.group.policy_version

    # -- forward passes and updates -----------------------------------------------------------------------------

    def do_log_probs(self, part: Arrays, meta: Mapping[str, Any], *, with_entropy: bool, otb: bool) -> Arrays:
        batch = from_arrays(part, meta)
        found = self.group.log_probs(batch, with_entropy=with_entropy, with_sum_pi_squared=otb)
        return to_arrays(found.batch)

    def do_ref_log_probs(self, part: Arrays, meta: Mapping[str, Any]) -> Arrays:
        return to_arrays(self.group.ref_log_probs(from_arrays(part, meta)).batch)

    def do_values(self, part: Arrays, meta: Mapping[str, Any]) -> Arrays:
        return to_arrays(self.group.values(from_arrays(part, meta)).batch)

    def do_train_actor(self, part: Arrays, prepared: Arrays, meta: Mapping[str, Any]) -> dict[str, Metric]:
        return self._train("actor", part, prepared, meta)

    def do_train_critic(self, part: Arrays, prepared: Arrays, meta: Mapping[str, Any]) -> dict[str, Metric]:
        return self._train("critic", part, prepared, meta)

    def _train(self, role: str, part: Arrays, prepared: Arrays, meta: Mapping[str, Any]) -> dict[str, Metric]:
        metrics = self.group.train_mini_batch(role, from_arrays(part, meta), from_arrays(prepared).batch)
        plain = {
            name: Metric(float(metric.value), metric.reduce, float(metric.weight))
            for name, metric in metrics.items()
        }
        if self.rank > 0:
            # One step was taken, not one on each rank.
            for name in ("grad_norm", "lr", "skipped_updates"):
                plain.pop(f"{role}/{name}", None)
        return plain

    def do_update_weights(self, version: int) -> dict[str, float]:
        self.group.policy_version = version
        self.group.sync_weights()
        return self.group.rollout_metrics()

    def do_model_size(self) -> Any:
        return self.group.model_size()

    # -- generation ---------------------------------------------------------------------------------------------

    def do_open_generation(self) -> None:
        self.group.open_generation()

    def do_close_generation(self) -> None:
        self.group.close_generation()

    # -- weights for processes that only generate ---------------------------------------------------------------

    def do_model_info(self) -> ModelInfo:
        return self.group.model_info()

    def do_adapter(self) -> Any:
        return self.group.adapter()

    def do_link(self, size: int) -> None:
        """Rank 0 sends to the rollout processes; the others only take part in gathering."""
        if self.rank == 0:
            watchdog_s = self.group.cfg.trainer.watchdog_s
            self._broadcast = Broadcast(
                self._store, SENDER, size, self.group.device, collective_timeout_s(watchdog_s)
            )

    def do_sync_weights(self, version: int) -> Manifest | None:
        """Returns what was sent, on the rank that sends."""
        self.group.policy_version = version
        sent = Manifest()
        with self.group.outgoing() as parts:
            for tensors in parts:
                if self._broadcast is not None:
                    sent.update(self._broadcast.send(tensors))
                else:
                    deque(tensors, maxlen=0)
        return sent if self._broadcast is not None else None

    def do_probe(
        self, prompt: tuple[int, ...], answers: list[tuple[tuple[int, ...], ...]]
    ) -> list[SourceLogProbs | None]:
        return self.group.probe(prompt, answers)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def do_save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> Path | None:
        assert self._checkpoints is not None
        parts = self.group.checkpoint_parts()
        return self._checkpoints.save(step, parts, state, tokenizer=self._tokenizer, metrics=metrics)

    def do_find_checkpoint(self, below: int | None) -> Any:
        """What `CheckpointManager.find` found; on the other ranks its step alone."""
        assert self._checkpoints is not None
        found = self._checkpoints.find(self.group.checkpoint_parts(), below)
        return found if self.rank == 0 or found is None else found[0]

    def do_load_found(self) -> bool:
        assert self._checkpoints is not None
        return self._checkpoints.load_found(self.group.checkpoint_parts())

    def do_wait_for_save(self) -> Path | None:
        assert self._checkpoints is not None
        return self._checkpoints.wait()

    def do_close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
