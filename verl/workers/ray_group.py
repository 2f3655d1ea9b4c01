"""The roles on several rank processes on Ray. The numbers are those of one process up to rounding.

The driver sends object references and ranks fetch the shard they work on; rows that several calls use are stored once.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch

from verl.config.methods import policy_loss
from verl.config.parallelism import Layout, engine_size, layout_of, rollout_pool
from verl.config.roles import ACTOR, find_role
from verl.data.proto import DataProto
from verl.observe.batch_metrics import ModelSize
from verl.observe.live import Snapshot, live
from verl.observe.metrics import Metric, reduce_metrics
from verl.rollout.weight_sync.probe import worst
from verl.workers.group import WorkerGroup
from verl.workers.local import pad_id
from verl.workers.rank import JoinedRank, RankSetup, RPCServer
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_rollout import RayRollout, RolloutPool
from verl.workers.roles import PREPARED, Kept
from verl.workers.shard_batch import (
    for_ranks,
    from_arrays,
    join,
    pad_rows,
    reported,
    shard_rows,
    to_arrays,
)
from verl.workers.train_rank import RankGroup, TrainRank

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.workers.own_loss import LossFunction

logger = logging.getLogger(__name__)
Built = TypeVar("Built")

START_S = 300.0
"""For processes to start and a cluster to free resources; loading models is under the watchdog instead."""
CLOSE_S = 10.0
WAIT_S = 1.0
"""How long a reader waits for ranks."""
FRESH_S = 0.5
"""Numbers this old are not asked for again."""

TRAIN_RANK = "verl.workers.train_rank:TrainRank"
_INPUTS = ("input_ids", "attention_mask", "response_mask")


class RayGroup(WorkerGroup):
    """One rank process per GPU (or CPU process) with all roles; or rollout in separate processes."""

    def __init__(
        self,
        cfg: PPOConfig,
        tokenizer: Any,
        *,
        training_steps: int | None,
        run_folder: Path | None,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__(cfg)
        self.cluster = Cluster(cfg)
        self.pool = RolloutPool(cfg) if rollout_pool(cfg) else None
        self._shards: dict[int, _Shards] = {}  # by their number: roles may be laid out differently
        setup = RankSetup(
            cfg=copy.deepcopy(cfg),
            tokenizer=tokenizer,
            training_steps=training_steps,
            run_folder=Path() if run_folder is None else run_folder.absolute(),
            model=model,
        )
        try:
            self.cluster.connect()
            self.calls = RankCalls(self.cluster.start_actors(START_S, TRAIN_RANK), cfg.trainer.watchdog_s)
            if self.pool is not None:
                self.pool.start_actors(START_S)
            others = self.pool.calls.addresses if self.pool else ()
            info = build_ranks(self.cluster, self.calls, TrainRank.do_build, setup, others=others)[0]
            if self.pool is not None:
                self.pool.build(self.calls, setup, info)
                self.pool.sync_weights(self.policy_version)
        except BaseException:
            self._end(ask=False)
            raise
        self._size: ModelSize = info.size
        generating = self.calls if self.pool is None else self.pool.calls
        self._live = RankSnapshots([self.calls] if self.pool is None else [self.calls, generating])
        self.rollout: RayRollout = RayRollout(
            generating,
            cfg.actor_rollout_ref.rollout.most_sequences,
            hosts=range(0, len(generating), engine_size(cfg) if self.pool is None else 1),
            colocated=self.pool is None,
        )
        self.pad_token_id = pad_id(tokenizer)

    # -- what the loop asks for ---------------------------------------------------------------------------------

    def generating(self) -> AbstractContextManager[None]:
        return self.rollout.kept_open()

    def forward(self, role: str, batch: DataProto, columns: Sequence[str]) -> DataProto:
        layout, row = self._layout(role), find_role(role)
        shards = self._shard(batch, row.inputs, layout.dp)
        meta = {name: batch.meta_info[name] for name in ("temperature",) if name in batch.meta_info}
        args = [(role, tuple(columns), ref, meta) for ref in shards.refs]
        found = self.calls.each(TrainRank.do_forward, for_ranks(layout, args), row.call)
        return join(reported(layout, found), shards.rows, len(batch))

    def train(
        self, role: str, mini: DataProto, *, loss: str | LossFunction | None = None, step: bool = True
    ) -> dict[str, Metric]:
        layout, together = self._layout(role), int(mini.meta_info.get("rows_together", 1))
        columns = [*find_role(role).trains_on, *(name for name in mini.batch if name.startswith(PREPARED))]
        if callable(loss):
            columns += mini.batch
        elif role == ACTOR:
            columns += policy_loss(loss or self.section(role).policy_loss.loss_mode).needs
        shards = self._shard(mini, columns, layout.dp, together)
        meta = {**mini.meta_info, "dp_size": layout.dp}
        shares = [(role, ref, meta, loss, step) for ref in shards.refs]
        label = f"train_{role}" if step else "forward_backward"
        found = self.calls.each(TrainRank.do_train, for_ranks(layout, shares), label)
        return reduce_metrics(reported(layout, found))

    def optim_step(self, role: str, lr: float | None = None) -> dict[str, float]:
        return self.calls.all(RankGroup.optim_step, role, lr)[0]

    def zero_grad(self, role: str) -> None:
        if not self.calls.broken:  # or nothing is asked of the ranks any more
            self.calls.all(RankGroup.zero_grad, role)

    def add(self, role: str, model: nn.Module | None = None) -> None:
        assert model is None, "ranks load a model from its path"
        self.calls.all(RankGroup.add, role)
        self.roles.append(find_role(role))

    def kept_tokens(self) -> list[Kept]:
        kept = self.calls.all(TrainRank.do_token_outputs)
        return [partial(dict, from_arrays(part).batch) for part in kept]

    def refresh(self, role: str) -> None:
        self.calls.all(RankGroup.refresh, role)

    def sync_weights(self) -> dict[str, float]:
        if self.pool is None:
            metrics = worst(self.calls.all(TrainRank.do_update_weights, self.policy_version))
        else:
            metrics = self.pool.sync_weights(self.policy_version)
        self.rollout.weights_updated(self.policy_version)
        return metrics

    @contextmanager
    def profile(self, step: int, run_folder: Path) -> Iterator[dict[str, float]]:
        """Of the trainer's ranks; after a step that failed they are asked for nothing more."""
        chosen = step in self.cfg.trainer.profile.steps
        if chosen:
            self.calls.all(TrainRank.do_profile, step, run_folder)
        measured: dict[str, float] = {}
        yield measured
        if chosen:
            parts = [part for part in self.calls.all(TrainRank.do_profile, None, run_folder) if part]
            measured |= (
                {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]} if parts else {}
            )

    def model_size(self) -> ModelSize:
        return self._size

    def live_snapshots(self) -> list[Snapshot]:
        return self._live.take()

    def close(self) -> None:
        self._live.close()
        broken = self.calls.broken or (self.pool is not None and self.pool.broken())
        if not broken:
            self.calls.shutdown(CLOSE_S)
        self._end(ask=not broken)

    def _end(self, *, ask: bool) -> None:
        if self.pool is not None:
            self.pool.close(CLOSE_S, ask=ask)
        self.cluster.close()

    # -- sharding a batch ---------------------------------------------------------------------------------------

    def _layout(self, role: str) -> Layout:
        return layout_of(self.section(role), len(self.calls))

    def _shard(self, batch: DataProto, columns: Sequence[str], count: int, together: int = 1) -> _Shards:
        """`count` shards in Ray's store, with those of `columns` that there are; those of the last batch are used again
        while it has not changed. So many consecutive rows stay `together`."""
        tensors = {name: batch.batch[name] for name in (*_INPUTS, *columns) if name in batch.batch}
        key = [(name, tensor, tensor._version) for name, tensor in tensors.items()]
        if count not in self._shards or not self._shards[count].built_from(key):
            padded = pad_rows(tensors, count * together)
            model = self.cfg.actor_rollout_ref.model
            rows = shard_rows(
                padded["attention_mask"],
                count,
                balance=self.cfg.trainer.balance_batch,
                hidden_size=self._size.hidden,
                together=together,
                sharing=padded if model.share_prefixes and model.use_remove_padding else None,
            )
            self._shards[count] = _Shards(key, rows, [ray.put(to_arrays(padded, share)) for share in rows])
        return self._shards[count]


def build_ranks(
    cluster: Cluster,
    calls: RankCalls,
    build: Callable[..., Built],
    setup: RankSetup[Any],
    *args: Any,
    others: Sequence[str] = (),
    joined: bool = True,
) -> list[Built]:
    """Build the ranks from `setup` (whose config is changed to their device) and `args`. `joined`: they meet at a store
    on rank 0; `others` are addresses of processes that connect to it too."""
    calls.handshake(START_S)
    gpus = cluster.on_gpus()
    setup.cfg.trainer.device = "cuda" if gpus else "cpu"
    setup.threads = None if gpus else cluster.threads()
    setup.one_host = len({*calls.addresses, *others}) == 1
    setup.devices = tuple(calls.devices)
    setup.search_path = tuple(os.path.abspath(folder) for folder in sys.path)
    setup.folder = os.getcwd()
    if joined and (len(calls) > 1 or others):
        address = "127.0.0.1" if setup.one_host else calls.addresses[0]
        setup.store = calls.one(0, JoinedRank.do_open_store, address)
    return calls.each(build, [(ray.put(setup), *args)] * len(calls))


@dataclass
class _Shards:
    """The shards of one batch, and the tensors they were built from."""

    key: list[tuple[str, torch.Tensor, int]]
    rows: list[list[int]]
    refs: list[Any]

    def built_from(self, key: list[tuple[str, torch.Tensor, int]]) -> bool:
        return len(key) == len(self.key) and all(
            name == mine and tensor is theirs and version == seen
            for (name, tensor, version), (mine, theirs, seen) in zip(key, self.key, strict=True)
        )


class RankSnapshots:
    """The newest live numbers of each rank, for threads that show them. A rank that does not answer in time keeps its
    last numbers and is not asked again before it has; the run never waits."""

    def __init__(self, roles: Sequence[RankCalls]) -> None:
        self._calls = RankCalls.together(*roles)
        self._newest: dict[int, Snapshot] = {}
        self._asked: dict[Any, int] = {}
        self._asked_at = 0.0
        self._closed = False
        self._lock = threading.Lock()

    def take(self) -> list[Snapshot]:
        with self._lock:
            # After the end Ray may be shut down, and a call would start it again.
            if not self._closed and time.monotonic() - self._asked_at > FRESH_S:
                try:
                    for rank, ref in self._calls.answers(self._asked, RPCServer.control_live, WAIT_S):
                        self._newest[rank] = ray.get(ref)
                except Exception:  # of a rank or of Ray: the run's own calls report it
                    self._asked = {}
                self._asked_at = time.monotonic()
            return [self._newest[rank] for rank in sorted(self._newest)]

    def close(self) -> None:
        """Nothing is asked after this; waits for a reader that is asking. No handle is left: the actors of the next Ray
        session of this process may have the same ids, and dropping a handle then would end them."""
        live.others = list
        with self._lock:
            self._closed = True
            self._calls.actors, self._asked = [], {}
