"""The roles on several rank processes on Ray. The numbers are those of one process up to rounding.

The driver sends object references and ranks fetch the shard they work on; rows that several calls use are stored once.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from verl.config.parallelism import ROLLOUT, Layout, engine_size, layout_of, rollout_pool
from verl.data.proto import DataProto
from verl.models.distillation import TEACHER_TENSORS
from verl.observe.batch_metrics import ModelSize
from verl.observe.live import Snapshot
from verl.observe.metrics import Metric, reduce_metrics
from verl.rollout.weight_sync.fingerprint import compare
from verl.rollout.weight_sync.probe import ProbeCheck, worst
from verl.workers.group import WorkerGroup, needs_critic, needs_implicit_reward
from verl.workers.local import pad_id
from verl.workers.rank import RankSetup
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_live import RankSnapshots
from verl.workers.ray_rollout import RayRollout
from verl.workers.roles import Kept
from verl.workers.shard_batch import (
    TOKEN_ROW,
    for_ranks,
    from_arrays,
    join,
    pad_rows,
    reported,
    shard_rows,
    to_arrays,
)

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig
    from verl.rollout.weight_sync.broadcast import SyncReport

logger = logging.getLogger(__name__)

START_S = 300.0
"""For processes to start and a cluster to free resources; loading models is under the watchdog instead."""
CLOSE_S = 10.0

TRAIN_RANK = "verl.workers.train_rank:TrainRank"
_INPUTS = ("input_ids", "attention_mask", "response_mask")
_TRAINING_TENSORS = {
    "actor": (
        "old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "rollout_is_weights",
        "sequence_num_tokens", TOKEN_ROW, *TEACHER_TENSORS,
    ),
    "critic": ("values", "returns", "sequence_num_tokens"),
    "implicit_reward": ("start_log_prob", "outcome"),
}  # fmt: skip


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
        training_steps: int,
        run_folder: Path,
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
            self._build(tokenizer, training_steps, run_folder, model)
            self._size = self.calls.all("model_size")[0]
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

    def _build(self, tokenizer: Any, training_steps: int, run_folder: Path, model: nn.Module | None) -> None:
        setup = RankSetup(
            cfg=copy.deepcopy(self.cfg),
            tokenizer=tokenizer,
            training_steps=training_steps,
            run_folder=run_folder.absolute(),
            model=model,
        )
        addresses = self.pool.calls.addresses if self.pool else ()
        build_ranks(self.cluster, self.calls, setup, others=addresses)
        if self.pool is not None:
            self.pool.build(self.calls, setup)
            self.pool.sync_weights(self.policy_version)

    # -- what the loop asks for ---------------------------------------------------------------------------------

    def generating(self) -> AbstractContextManager[None]:
        return self.rollout.kept_open()

    def log_probs(self, batch: DataProto, *, with_sum_pi_squared: bool = False) -> DataProto:
        return self._pass("actor", "log_probs", batch, {"otb": with_sum_pi_squared})

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        return self._pass("ref", "ref_log_probs", batch)

    def teacher_outputs(self, batch: DataProto) -> DataProto:
        return self._pass("teacher", "teacher_outputs", batch)

    def values(self, batch: DataProto) -> DataProto:
        return self._pass("critic", "values", batch)

    def start_log_probs(self, batch: DataProto) -> DataProto:
        return self._pass("implicit_reward", "start_log_probs", batch)

    def implicit_rewards(self, batch: DataProto) -> DataProto:
        return self._pass("implicit_reward", "implicit_rewards", batch, more=("start_log_prob",))

    def train_mini_batch(
        self, role: str, mini: DataProto, prepared: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Metric]:
        layout = self._layout(role)
        shards = self._shard(self._chosen(mini, _TRAINING_TENSORS[role]), layout.dp)
        extra = pad_rows(prepared, layout.dp) if prepared else {}
        meta = {**mini.meta_info, "dp_size": layout.dp}
        args = [
            (ref, to_arrays(extra, rows), meta) for ref, rows in zip(shards.refs, shards.rows, strict=True)
        ]
        return reduce_metrics(self._each(layout, f"train_{role}", args))

    def kept_tokens(self) -> list[Kept]:
        return [partial(dict, from_arrays(found).batch) for found in self.calls.all("token_outputs")]

    def refresh_reference(self) -> None:
        self.calls.all("refresh_reference")

    def sync_weights(self) -> dict[str, float]:
        if self.pool is None:
            metrics = worst(self.calls.all("update_weights", self.policy_version))
        else:
            metrics = self.pool.sync_weights(self.policy_version)
        self.rollout.weights_updated(self.policy_version)
        return metrics

    @contextmanager
    def profile(self, step: int, run_folder: Path) -> Iterator[None]:
        """Of the trainer's ranks; after a step that failed they are asked for nothing more."""
        chosen = step in self.cfg.trainer.profile.steps
        if chosen:
            self.calls.all("start_profile", step, run_folder)
        yield
        if chosen:
            self.calls.all("end_profile")

    def model_size(self) -> ModelSize:
        return self._size

    def checkpoint_parts(self) -> dict[str, Any]:
        """Names only: the ranks have the engines and save them (`placement.RayCheckpoints`)."""
        roles = {"critic": needs_critic, "implicit_reward": needs_implicit_reward}
        return {"actor": None, **{name: None for name, needed in roles.items() if needed(self.cfg)}}

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

    def _each(
        self,
        layout: Layout,
        call: str,
        args: Sequence[tuple[Any, ...]],
        options: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """A call with the arguments of each shard, and the answers for each shard."""
        return reported(layout, self.calls.each(call, for_ranks(layout, args), options))

    def _pass(
        self,
        role: str,
        call: str,
        batch: DataProto,
        options: Mapping[str, Any] | None = None,
        more: Sequence[str] = (),
    ) -> DataProto:
        layout = self._layout(role)
        shards = self._shard(self._chosen(batch, more), layout.dp)
        meta = {name: batch.meta_info[name] for name in ("temperature",) if name in batch.meta_info}
        found = self._each(layout, call, [(ref, meta) for ref in shards.refs], options)
        return join(found, shards.rows, len(batch))

    @staticmethod
    def _chosen(batch: DataProto, more: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: batch.batch[name] for name in (*_INPUTS, *more) if name in batch.batch}

    def _shard(self, tensors: Mapping[str, torch.Tensor], count: int) -> _Shards:
        """`count` shards in Ray's store; those of the last batch are used again while it has not changed."""
        key = [(name, tensor, tensor._version) for name, tensor in tensors.items()]
        if count not in self._shards or not self._shards[count].built_from(key):
            padded = pad_rows(tensors, count)
            rows = shard_rows(
                padded["attention_mask"],
                count,
                balance=self.cfg.trainer.balance_batch,
                hidden_size=self._size.hidden,
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

    def build(self, trainer: RankCalls, setup: RankSetup[PPOConfig]) -> None:
        """Start the engines (the trainer's ranks have been built with `setup`) and connect both sides."""
        info, adapter = trainer.all("model_info")[0], trainer.all("adapter")[0]
        own = copy.copy(setup)
        own.threads = None if setup.threads is None else self.cluster.threads()
        self.calls.all("build", ray.put(own), info, adapter)
        self._trainer = trainer
        self._all_calls = RankCalls.together(trainer, self.calls)
        self._all_calls.all("link", 1 + len(self.calls))
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
        sent, *found = self._sync_calls.all("sync_weights", version)
        arrivals: list[SyncReport] = found[len(self._trainer) - 1 :]
        for name, arrival in zip(self.calls.names, arrivals, strict=True):
            compare(sent, arrival.received, version, name, _ADVICE)
        probed = {
            name: arrival for name, arrival in zip(self.calls.names, arrivals, strict=True) if arrival.tokens
        }
        if not probed:
            return {}
        prompt = next(iter(probed.values())).prompt
        answers = list({arrival.tokens for arrival in probed.values()})
        known = dict(zip(answers, self._trainer.all("probe", prompt, answers)[0], strict=True))
        for name, arrival in probed.items():
            check = self._probes.setdefault(name, ProbeCheck(name, arrival.precision, _ADVICE))
            check.add(version, arrival.log_probs, known[arrival.tokens])
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
    setup: RankSetup[Any],
    *args: Any,
    others: Sequence[str] = (),
    joined: bool = True,
) -> None:
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
        setup.store = calls.one(0, "open_store", address)
    calls.all("build", ray.put(setup), *args)


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
