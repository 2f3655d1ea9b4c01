"""One rank of a run on several processes: its part of every engine, and the calls the controller sends it.

Plain Python: nothing here knows how calls arrive (Ray, or a test that starts processes by hand).

What always holds: every rank gets the same calls in the same order, because sharded weights are gathered in step;
only generation between `open_generation` and `close_generation` goes at each rank's own pace, on weights that are
whole for that long.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from verl.checkpoint import CheckpointManager
from verl.observe.metrics import Metric
from verl.rollout.base import Request, Response
from verl.rollout.weight_sync.broadcast import SENDER, Broadcast
from verl.rollout.weight_sync.fingerprint import Manifest
from verl.workers.generating import Generating
from verl.workers.process import patience, prepare
from verl.workers.rank_group import RankGroup
from verl.workers.rpc_server import RPCServer
from verl.workers.shard_batch import Arrays, from_arrays, to_arrays

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.data.proto import DataProto
    from verl.models.weight_source import SourceLogProbs
    from verl.rollout.model_info import ModelInfo


@dataclass
class RankSetup:
    """What every rank is built from."""

    cfg: PPOConfig
    tokenizer: Any
    training_steps: int
    run_folder: Path
    store: tuple[str, int] | None = None
    """Where rank 0 keeps the store the ranks meet at; None: alone."""
    threads: int | None = None
    """For a CPU rank; None: as torch finds it."""
    one_host: bool = True
    search_path: tuple[str, ...] = ()
    """Where the controller finds modules; plugins are found there too, if the folder is on this node."""
    folder: str = ""
    """Where the controller was started: paths in the config mean the same here, if the folder is on this node."""
    model: nn.Module | None = None
    devices: tuple[str, ...] = ()
    """The GPU each rank sees, by rank."""


class RankWorker(RPCServer):
    """One rank of the trainer."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank)
        self.world_size = world_size
        self.generating = Generating()
        self._store: Any = None
        self._group: RankGroup | None = None
        self._checkpoints: CheckpointManager | None = None
        self._broadcast: Broadcast | None = None

    @property
    def group(self) -> RankGroup:
        assert self._group is not None
        return self._group

    # -- coming together ----------------------------------------------------------------------------------------

    def do_open_store(self, address: str) -> tuple[str, int]:
        """On rank 0: the meeting point, on a port the system picks, reachable by this address only."""
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

    def do_build(self, setup: RankSetup) -> None:
        """Join the process group and load this rank's part of the models."""
        from verl.runtime import seed_everything

        prepare(setup, self._address)
        if self.world_size > 1:
            self._join(setup)
        seed_everything(setup.cfg.trainer.seed)
        self._group = self.build_group(setup)
        self._checkpoints = CheckpointManager.from_config(setup.cfg, setup.run_folder)
        self._tokenizer = setup.tokenizer

    def build_group(self, setup: RankSetup) -> Any:
        """What this rank trains with, once it has joined the others."""
        return RankGroup(setup, self.rank)

    def _join(self, setup: RankSetup) -> None:
        assert setup.store is not None
        cuda = setup.cfg.trainer.device == "cuda"
        if self._store is None:
            self._store = dist.TCPStore(*setup.store, self.world_size, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=patience(setup.cfg.trainer.watchdog_s)),
        )

    # -- passes and updates -------------------------------------------------------------------------------------

    def do_log_probs(self, part: Arrays, meta: Mapping[str, Any], *, with_entropy: bool, otb: bool) -> Arrays:
        batch = from_arrays(part, meta)
        return _arrays(self.group.log_probs(batch, with_entropy=with_entropy, with_sum_pi_squared=otb))

    def do_ref_log_probs(self, part: Arrays, meta: Mapping[str, Any]) -> Arrays:
        return _arrays(self.group.ref_log_probs(from_arrays(part, meta)))

    def do_values(self, part: Arrays, meta: Mapping[str, Any]) -> Arrays:
        return _arrays(self.group.values(from_arrays(part, meta)))

    def do_train_actor(self, part: Arrays, meta: Mapping[str, Any]) -> dict[str, Metric]:
        return self._train("actor", part, meta)

    def do_train_critic(self, part: Arrays, meta: Mapping[str, Any]) -> dict[str, Metric]:
        return self._train("critic", part, meta)

    def _train(self, role: str, part: Arrays, meta: Mapping[str, Any]) -> dict[str, Metric]:
        metrics = self.group.train_mini_batch(role, from_arrays(part, meta))
        plain = {
            name: Metric(float(metric.value), metric.reduce, float(metric.weight))
            for name, metric in metrics.items()
        }
        if self.rank > 0:
            # One step was taken, not one on each rank.
            for name in ("grad_norm", "lr", "skipped_updates"):
                plain.pop(f"{role}/{name}", None)
        return plain

    def do_publish(self, version: int) -> dict[str, float]:
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

    def do_generate(self, requests: list[Request], number: int) -> Iterator[list[Response]]:
        group = self.group
        return self.generating.run(group.rollout.engine, requests, number, group.policy_version)

    # -- weights for processes that only generate ---------------------------------------------------------------

    def do_model_info(self) -> ModelInfo:
        return self.group.model_info()

    def do_adapter(self) -> Any:
        return self.group.adapter()

    def do_link(self, size: int) -> None:
        """Rank 0 sends to all of them; the others only help it gather."""
        if self.rank == 0:
            watchdog_s = self.group.cfg.trainer.watchdog_s
            self._broadcast = Broadcast(self._store, SENDER, size, self.group.device, patience(watchdog_s))

    def do_sync_weights(self, version: int) -> Manifest | None:
        """What was sent, on the rank that sends."""
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


def _arrays(batch: DataProto) -> dict[str, np.ndarray]:
    return to_arrays(batch.batch)
