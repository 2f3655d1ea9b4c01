"""The roles on several rank processes on Ray. The numbers are those of one process up to rounding.

The driver sends object references and ranks fetch the shard they work on; rows that several calls use are stored once.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
import torch

from verl.config.methods import policy_loss
from verl.config.parallelism import ROLLOUT, Layout, engine_size, layout_of, rollout_pool
from verl.config.roles import ACTOR, find_role, saved_roles
from verl.data.proto import DataProto
from verl.observe.batch_metrics import ModelSize
from verl.observe.live import Snapshot
from verl.observe.metrics import Metric, reduce_metrics
from verl.rollout.weight_sync.fingerprint import compare
from verl.rollout.weight_sync.probe import ProbeCheck, worst
from verl.workers.group import WorkerGroup
from verl.workers.local import pad_id
from verl.workers.rank import JoinedRank, RankSetup
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_live import RankSnapshots
from verl.workers.ray_rollout import RayRollout
from verl.workers.roles import Kept
from verl.workers.rollout_rank import RolloutRank
from verl.workers.shard_batch import (
    for_ranks,
    from_arrays,
    join,
    pad_rows,
    reported,
    shard_rows,
    to_arrays,
)
from verl.workers.train_rank import RankGroup, RankInfo, TrainRank

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.rollout.weight_sync.broadcast import SyncReport
    from verl.workers.own_loss import LossFunction

logger = logging.getLogger(__name__)
Built = TypeVar("Built")

START_S = 300.0
"""For processes to start and a cluster to free resources; loading models is under the watchdog instead."""
CLOSE_S = 10.0

TRAIN_RANK = "verl.workers.train_rank:TrainRank"
_INPUTS = ("input_ids", "attention_mask", "response_mask")
_ADVICE = (
    f"generate on the trainer's GPUs ({ROLLOUT}.nnodes=0 {ROLLOUT}.n_gpus_per_node=0) if it happens again"
)


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
        self._size: ModelSize
        try:
            self.cluster.connect()
            self._start_actors()
            self._size = self._build(tokenizer, training_steps, run_folder, model)
            self._live = RankSnapshots([self.calls, *([self.pool.calls] if self.pool else [])])
        except BaseException:
            self._end(ask=False)
            raise
        self.rollout: RayRollout = self._rollout_engine()
        self.pad_token_id = pad_id(tokenizer)

    def _start_actors(self) -> None:
        """The ranks and the processes that only generate."""
        actors = self.cluster.start_actors(START_S, TRAIN_RANK)
        self.calls = RankCalls(actors, self.cfg.trainer.watchdog_s)
        if self.pool is not None:
            self.pool.start_actors(START_S)

    def _rollout_engine(self) -> RayRollout:
        calls = self.calls if self.pool is None else self.pool.calls
        size = engine_size(self.cfg) if self.pool is None else 1
        return RayRollout(
            calls,
            self.cfg.actor_rollout_ref.rollout.max_num_seqs,
            hosts=range(0, len(calls), size),
            colocated=self.pool is None,
        )

    def _build(
        self, tokenizer: Any, training_steps: int | None, run_folder: Path | None, model: nn.Module | None
    ) -> ModelSize:
        setup = RankSetup(
            cfg=copy.deepcopy(self.cfg),
            tokenizer=tokenizer,
            training_steps=training_steps,
            run_folder=Path() if run_folder is None else run_folder.absolute(),
            model=model,
        )
        addresses = self.pool.calls.addresses if self.pool else ()
        info = build_ranks(self.cluster, self.calls, TrainRank.do_build, setup, others=addresses)[0]
        if self.pool is not None:
            self.pool.build(self.calls, setup, info)
            self.pool.sync_weights(self.policy_version)
        return info.size

    # -- what the loop asks for ---------------------------------------------------------------------------------

    def generating(self) -> AbstractContextManager[None]:
        return self.rollout.kept_open()

    def forward(self, role: str, batch: DataProto, columns: Sequence[str]) -> DataProto:
        layout, row = self._layout(role), find_role(role)
        shards = self._shard(self._chosen(batch, row.inputs), layout.dp)
        meta = {name: batch.meta_info[name] for name in ("temperature",) if name in batch.meta_info}
        args = [(role, tuple(columns), ref, meta) for ref in shards.refs]
        found = self.calls.each(TrainRank.do_forward, for_ranks(layout, args), row.call)
        return join(reported(layout, found), shards.rows, len(batch))

    def train(
        self, role: str, mini: DataProto, prepared: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Metric]:
        return self._learn(TrainRank.do_train, f"train_{role}", role, mini, prepared)

    def forward_backward(
        self,
        role: str,
        mini: DataProto,
        prepared: Mapping[str, torch.Tensor] | None = None,
        loss: str | LossFunction | None = None,
    ) -> dict[str, Metric]:
        columns = () if loss is None or isinstance(loss, str) else tuple(mini.batch)
        if isinstance(loss, str):
            columns = policy_loss(loss).needs
        return self._learn(TrainRank.do_forward_backward, "", role, mini, prepared, columns, loss)

    def _learn(
        self,
        call: Callable[..., dict[str, Metric]],
        label: str,
        role: str,
        mini: DataProto,
        prepared: Mapping[str, torch.Tensor] | None,
        columns: Sequence[str] = (),
        *args: Any,
    ) -> dict[str, Metric]:
        """A training call with the shards of a mini-batch. `columns`: those it reads besides the role's."""
        layout = self._layout(role)
        together = int(mini.meta_info.get("rows_together", 1))
        shards = self._shard(self._chosen(mini, (*self._trains_on(role), *columns)), layout.dp, together)
        extra = pad_rows(prepared, layout.dp * together) if prepared else {}
        meta = {**mini.meta_info, "dp_size": layout.dp}
        shares = [
            (role, ref, to_arrays(extra, rows), meta, *args)
            for ref, rows in zip(shards.refs, shards.rows, strict=True)
        ]
        return reduce_metrics(reported(layout, self.calls.each(call, for_ranks(layout, shares), label)))

    def optim_step(self, role: str, lr: float | None = None) -> dict[str, float]:
        return self.calls.all(RankGroup.optim_step, role, lr)[0]

    def zero_grad(self, role: str) -> None:
        if not self.calls.broken:  # or nothing is asked of the ranks any more
            self.calls.all(RankGroup.zero_grad, role)

    def add(self, role: str, model: nn.Module | None = None) -> None:
        assert model is None, "ranks load a model from its path"
        self.calls.all(RankGroup.add, role)
        self.roles.append(find_role(role))

    def _trains_on(self, role: str) -> tuple[str, ...]:
        """The columns a role's loss reads; the actor's also what its policy loss says it needs."""
        columns = find_role(role).trains_on
        if role != ACTOR:
            return columns
        loss = policy_loss(self.cfg.actor_rollout_ref.actor.policy_loss.loss_mode)
        return tuple(dict.fromkeys((*columns, *loss.needs)))

    def kept_tokens(self) -> list[Kept]:
        return [
            partial(dict, from_arrays(found).batch) for found in self.calls.all(TrainRank.do_token_outputs)
        ]

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
    def profile(self, step: int, run_folder: Path) -> Iterator[None]:
        """Of the trainer's ranks; after a step that failed they are asked for nothing more."""
        chosen = step in self.cfg.trainer.profile.steps
        if chosen:
            self.calls.all(TrainRank.do_profile, step, run_folder)
        yield
        if chosen:
            self.calls.all(TrainRank.do_profile, None, run_folder)

    def model_size(self) -> ModelSize:
        return self._size

    def checkpoint_parts(self) -> dict[str, Any]:
        """Names only: the ranks have the engines and save them (`placement.RayCheckpoints`)."""
        return dict.fromkeys(saved_roles(self.cfg))

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

    @staticmethod
    def _chosen(batch: DataProto, more: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: batch.batch[name] for name in (*_INPUTS, *more) if name in batch.batch}

    def _shard(self, tensors: Mapping[str, torch.Tensor], count: int, together: int = 1) -> _Shards:
        """`count` shards in Ray's store; those of the last batch are used again while it has not changed. So many
        consecutive rows stay `together`."""
        key = [(name, tensor, tensor._version) for name, tensor in tensors.items()]
        if count not in self._shards or not self._shards[count].built_from(key):
            padded = pad_rows(tensors, count * together)
            rows = shard_rows(
                padded["attention_mask"],
                count,
                balance=self.cfg.trainer.balance_batch,
                hidden_size=self._size.hidden,
                together=together,
            )
            self._shards[count] = _Shards(key, rows, [ray.put(to_arrays(padded, share)) for share in rows])
        return self._shards[count]


class RolloutPool:
    """Engines in separate processes, behind `calls`."""

    def __init__(self, cfg: PPOConfig) -> None:
        self.cluster = Cluster(cfg, ROLLOUT)
        self._watchdog_s = cfg.trainer.watchdog_s
        self._probes: dict[str, ProbeCheck] = {}
        self._calls: RankCalls | None = None
        self._all_calls: RankCalls | None = None
        self._sync_calls: RankCalls | None = None
        self._trainer: RankCalls | None = None

    @property
    def calls(self) -> RankCalls:
        assert self._calls is not None
        return self._calls

    def start_actors(self, timeout_s: float) -> None:
        """Start the processes."""
        actors = self.cluster.start_actors(timeout_s, "verl.workers.rollout_rank:RolloutRank")
        self._calls = RankCalls(actors, self._watchdog_s, "rollout rank")
        self.calls.handshake(timeout_s)

    def build(self, trainer: RankCalls, setup: RankSetup[PPOConfig], info: RankInfo) -> None:
        """Start the engines (the trainer's ranks have been built with `setup`) and connect both sides."""
        own = copy.copy(setup)
        own.threads = None if setup.threads is None else self.cluster.threads()
        assert info.model is not None
        self.calls.all(RolloutRank.do_build, ray.put(own), info.model, info.adapter)
        self._trainer = trainer
        self._all_calls = RankCalls.together(trainer, self.calls)
        self._all_calls.all(TrainRank.do_link, 1 + len(self.calls))
        # The trainer's ranks send when their other calls are done; those that generate take it without stopping.
        self._sync_calls = RankCalls.together(trainer, self.calls.between_polls())
        self.calls.peers, trainer.peers = [trainer], [self.calls]
        pool = self.cluster.pool
        logger.info(
            "rollout: %d separate processes (%s.nnodes=%d, %s.n_gpus_per_node=%d)",
            len(self.calls),
            ROLLOUT,
            pool.nodes,
            ROLLOUT,
            pool.per_node,
        )

    def sync_weights(self, version: int) -> dict[str, float]:
        """The trainer's weights to all of them, as policy `version`, while they generate or not; compared by
        fingerprint, and by log-probs where an engine could compute them. Metrics are those of the worst process."""
        assert self._sync_calls is not None and self._trainer is not None
        # Both kinds of process serve it: the trainer's first rank says what was sent, the others what arrived.
        sent, *found = self._sync_calls.each(TrainRank.do_sync_weights, [(version,)] * len(self._sync_calls))
        arrivals = cast("list[SyncReport]", found[len(self._trainer) - 1 :])
        assert sent is not None
        for name, arrival in zip(self.calls.names, arrivals, strict=True):
            compare(sent, arrival.received, version, name, _ADVICE)
        probed = {
            name: arrival for name, arrival in zip(self.calls.names, arrivals, strict=True) if arrival.tokens
        }
        if not probed:
            return {}
        prompt = next(iter(probed.values())).prompt
        answers = list({arrival.tokens for arrival in probed.values()})
        known = dict(zip(answers, self._trainer.all(RankGroup.probe, prompt, answers)[0], strict=True))
        for name, arrival in probed.items():
            check = self._probes.setdefault(name, ProbeCheck(name, arrival.precision, _ADVICE))
            own = known[arrival.tokens]
            assert own is not None, "a training engine computes log-probs"
            check.add(version, arrival.log_probs, own)
        return worst([self._probes[name].metrics() for name in probed])

    def broken(self) -> bool:
        """Whether a call to these processes, alone or together with the trainer's, has failed."""
        return any(
            calls is not None and calls.broken for calls in (self._calls, self._all_calls, self._sync_calls)
        )

    def close(self, seconds: float, *, ask: bool) -> None:
        """End them, after letting the engines close where that can be asked for."""
        if ask and self._calls is not None:
            self._calls.shutdown(seconds)
        self.cluster.close()


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
