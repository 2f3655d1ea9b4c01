"""One rank of a run on several processes: its part of every engine, and the calls the controller sends it.

Plain Python: nothing here knows how calls arrive (Ray, or a test that starts processes by hand).

What always holds: every rank gets the same calls in the same order, because sharded weights are gathered in step;
only generation between `open_generation` and `close_generation` goes at each rank's own pace, on weights that are
whole for that long.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from verl.checkpoint import CheckpointManager
from verl.observe.metrics import Metric
from verl.rollout.base import Request, Response
from verl.workers.local import LocalGroup
from verl.workers.serving import CallServer
from verl.workers.shares import Arrays, from_arrays, to_arrays

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.data.proto import DataProto
    from verl.engines.base import TrainEngine

FLUSH_S = 0.1
"""Finished responses travel together when they finish this close to each other."""
_SIOCGIFADDR = 0x8915  # Linux
_OWN_WEIGHTS = ("vllm", "sglang")
"""Engines that generate from weights handed over to them, not from the trainer's."""


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
    model: nn.Module | None = None


class HeldWeights:
    """The actor as a rollout engine sees it: whole while held, so that generating needs no step with others."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._module: nn.Module | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._engine.full_parameters() as module:
            self._module = module
            try:
                yield
            finally:
                self._module = None

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        if self._module is not None:
            yield self._module
            return
        with self._engine.full_parameters() as module:
            yield module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class RankGroup(LocalGroup):
    """All roles of this rank. The engines shard themselves over the process group."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(
            setup.cfg,
            setup.tokenizer,
            training_steps=setup.training_steps,
            model=setup.model,
            bad_batch_dir=setup.run_folder / "bad_batches",
        )
        self.held = HeldWeights(self.actor_engine)
        self.rollout.engine.update_weights(self.held, 0)
        self._generation: ExitStack | None = None

    def publish_weights(self) -> None:
        self.rollout.engine.update_weights(self.held, self.policy_version)

    def open_generation(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._resident("actor", optimizer=False))
            if self.cfg.actor_rollout_ref.rollout.name not in _OWN_WEIGHTS:
                stack.enter_context(self.held.hold())
            self.rollout.engine.wake()
            if self.cfg.actor_rollout_ref.rollout.free_cache_engine:
                stack.callback(self.rollout.engine.sleep)
            self._generation = stack.pop_all()

    def close_generation(self) -> None:
        if self._generation is not None:
            self._generation.close()
            self._generation = None


class RankWorker(CallServer):
    """One rank of the trainer."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank)
        self.world_size = world_size
        self._store: Any = None
        self._group: RankGroup | None = None
        self._checkpoints: CheckpointManager | None = None

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
        from verl.config.load import import_plugins
        from verl.trainer.setup import quiet_transformers, seed_everything

        quiet_transformers()
        sys.path += [folder for folder in setup.search_path if folder not in sys.path]
        import_plugins(setup.cfg)
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        if self.world_size > 1:
            self._join(setup)
        seed_everything(setup.cfg.trainer.seed)
        self._group = self.build_group(setup)
        self._checkpoints = CheckpointManager.from_config(setup.cfg, setup.run_folder)
        self._tokenizer = setup.tokenizer

    def build_group(self, setup: RankSetup) -> Any:
        """What this rank trains with, once it has joined the others."""
        return RankGroup(setup)

    def _join(self, setup: RankSetup) -> None:
        assert setup.store is not None
        cuda = setup.cfg.trainer.device == "cuda"
        # Left alone, gloo takes the address of the host's name, which is often one that others cannot reach.
        interface = interface_of("127.0.0.1" if setup.one_host else self._address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self._store is None:
            self._store = dist.TCPStore(*setup.store, self.world_size, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            # The controller notices a hang first and says who waits for whom; this is for when it is gone.
            timeout=timedelta(seconds=2 * setup.cfg.trainer.watchdog_s + 60),
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

    def do_publish(self, version: int) -> None:
        self.group.policy_version = version
        self.group.publish_weights()

    def do_model_size(self) -> Any:
        return self.group.model_size()

    # -- generation ---------------------------------------------------------------------------------------------

    def do_open_generation(self) -> None:
        self.group.open_generation()

    def do_close_generation(self) -> None:
        self.group.close_generation()

    def do_generate(self, requests: list[Request]) -> Iterator[list[Response]]:
        finished: list[Response] = []
        sent = time.monotonic()
        for response in self.group.rollout.engine.generate(requests):
            finished.append(response)
            if time.monotonic() - sent > FLUSH_S:
                yield finished
                finished, sent = [], time.monotonic()
        yield finished

    # -- checkpoints --------------------------------------------------------------------------------------------

    def do_save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> Path | None:
        assert self._checkpoints is not None
        parts = self.group.checkpoint_parts()
        return self._checkpoints.save(step, parts, state, tokenizer=self._tokenizer, metrics=metrics)

    def do_resume(self) -> Any:
        assert self._checkpoints is not None
        state = self._checkpoints.resume(self.group.checkpoint_parts())
        return state if self.rank == 0 else state is not None

    def do_wait_for_save(self) -> Path | None:
        assert self._checkpoints is not None
        return self._checkpoints.wait()

    def do_close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


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


def _arrays(batch: DataProto) -> dict[str, np.ndarray]:
    return to_arrays(batch.batch)
