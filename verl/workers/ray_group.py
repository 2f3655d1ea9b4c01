"""The roles on several ranks, one Ray actor each, behind the interface the loop knows.

What always holds: the controller sends handles, ranks fetch their own part; what a rank gets twice (the same rows
for log-probs, reference and values) is stored once; the numbers are those of one process up to rounding.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from verl.config.pools import engine_size, rollout_pool
from verl.data.proto import DataProto
from verl.observe.batch_metrics import ModelSize
from verl.observe.metrics import Metric, reduce_metrics
from verl.rollout.weight_sync.probe import worst
from verl.workers.group import WorkerGroup
from verl.workers.local import pad_id
from verl.workers.needs import needs_critic
from verl.workers.rank import RankSetup
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_pool import RolloutPool
from verl.workers.ray_rollout import GeneratingRankActor, SpreadRollout
from verl.workers.rollout import GenerationSettings, OnFinish, RolloutRole
from verl.workers.shard_batch import deal, join, pad_rows, to_arrays

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import PPOConfig

logger = logging.getLogger(__name__)

START_S = 300.0
"""For processes to come up and a cluster to make room; loading models is watched by signs of life instead."""
CLOSE_S = 10.0

_INPUTS = ("input_ids", "attention_mask", "response_mask")
_LEARNT_FROM = {
    "actor": ("old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "rollout_is_weights"),
    "critic": ("values", "returns"),
}


class RayGroup(WorkerGroup):
    """One actor per GPU (or CPU process), all roles on each; or rollout on others of its own."""

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
        self._stored: _Stored | None = None
        self._size: ModelSize
        self._rollout_metrics: dict[str, float] = {}
        try:
            self.cluster.connect()
            self._place()
            self._build(tokenizer, training_steps, run_folder, model)
            self._size = self.calls.all("model_size")[0]
        except BaseException:
            self._end(ask=False)
            raise
        self.rollout = RolloutRole(self._rollout(), pad_id(tokenizer))

    def _place(self) -> None:
        """The ranks and the processes that only generate: whoever needs more on one node first."""
        cfg, pool = self.cfg, self.pool
        wider = pool is not None and pool.cluster.pool.per_node > self.cluster.pool.per_node
        if pool is not None and wider:
            pool.place(START_S)
        self.calls = RankCalls(self.cluster.place(START_S, GeneratingRankActor), cfg.trainer.watchdog_s)
        if pool is not None and not wider:
            pool.place(START_S)

    def _rollout(self) -> SpreadRollout:
        calls = self.calls if self.pool is None else self.pool.calls
        size = engine_size(self.cfg) if self.pool is None else 1
        return SpreadRollout(
            calls,
            self.cfg.actor_rollout_ref.rollout.max_num_seqs,
            hosts=range(0, len(calls), size),
            shared=self.pool is None,
            publish=self._publish,
        )

    def _build(self, tokenizer: Any, training_steps: int, run_folder: Path, model: nn.Module | None) -> None:
        setup = RankSetup(
            cfg=copy.deepcopy(self.cfg),
            tokenizer=tokenizer,
            training_steps=training_steps,
            run_folder=run_folder.absolute(),
            model=model,
        )
        build_ranks(self.cluster, self.calls, setup, self.pool.calls.addresses if self.pool else ())
        if self.pool is not None:
            self.pool.build(self.calls, setup)
            self.pool.sync_weights(self.policy_version)

    # -- what the loop asks for ---------------------------------------------------------------------------------

    def generate(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish | None = None
    ) -> DataProto:
        return self.rollout.generate(prompts, settings, on_finish)

    def log_probs(
        self, batch: DataProto, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> DataProto:
        options = {"with_entropy": with_entropy, "otb": with_sum_pi_squared}
        return self._pass("log_probs", batch, options)

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        return self._pass("ref_log_probs", batch)

    def values(self, batch: DataProto) -> DataProto:
        return self._pass("values", batch)

    def train_mini_batch(self, role: str, mini: DataProto) -> dict[str, Metric]:
        prepared = [name for name in mini.batch if name.startswith("prepared.")]
        tensors = self._chosen(mini, [*_LEARNT_FROM[role], *prepared])
        meta = {**mini.meta_info, "dp_size": len(self.calls)}
        parts = self._deal(tensors).refs
        found = self.calls.each(f"train_{role}", [(part, meta) for part in parts])
        return reduce_metrics(found)

    def sync_weights(self) -> None:
        self.rollout.engine.update_weights(None, self.policy_version)  # type: ignore[arg-type]

    def _publish(self, version: int) -> None:
        if self.pool is None:
            self._rollout_metrics = worst(self.calls.all("publish", version))
        else:
            self.pool.sync_weights(version)
            self._rollout_metrics = self.pool.metrics()

    def rollout_metrics(self) -> dict[str, float]:
        return self._rollout_metrics

    def model_size(self) -> ModelSize:
        return self._size

    def checkpoint_parts(self) -> dict[str, Any]:
        """Names only: the engines are on the ranks, and so is their saving (`ray_checkpoints`)."""
        return {"actor": None, **({"critic": None} if needs_critic(self.cfg) else {})}

    def close(self) -> None:
        broken = self.calls.broken or (self.pool is not None and self.pool.broken())
        if not broken:
            self.calls.shutdown(CLOSE_S)
        self._end(ask=not broken)

    def _end(self, *, ask: bool) -> None:
        if self.pool is not None:
            self.pool.close(CLOSE_S, ask=ask)
        self.cluster.close()

    # -- how a batch reaches the ranks --------------------------------------------------------------------------

    def _pass(self, call: str, batch: DataProto, options: Mapping[str, Any] | None = None) -> DataProto:
        dealt = self._deal(self._chosen(batch, ()))
        meta = {name: batch.meta_info[name] for name in ("temperature",) if name in batch.meta_info}
        found = self.calls.each(call, [(part, meta) for part in dealt.refs], options)
        return join(found, dealt.rows, len(batch))

    @staticmethod
    def _chosen(batch: DataProto, more: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: batch.batch[name] for name in (*_INPUTS, *more) if name in batch.batch}

    def _deal(self, tensors: Mapping[str, torch.Tensor]) -> _Stored:
        """The parts in Ray's store; those of the last batch are used again while it has not changed."""
        key = [(name, tensor, tensor._version) for name, tensor in tensors.items()]
        if self._stored is None or not self._stored.same(key):
            padded = pad_rows(tensors, len(self.calls))
            rows = deal(
                padded["attention_mask"],
                len(self.calls),
                balance=self.cfg.trainer.balance_batch,
                hidden_size=self._size.hidden,
            )
            refs = [ray.put(to_arrays(padded, share)) for share in rows]
            self._stored = _Stored(key, rows, refs)
        return self._stored


def build_ranks(cluster: Cluster, calls: RankCalls, setup: RankSetup, others: Sequence[str] = ()) -> None:
    """Let the ranks meet and build what `setup` (its config is changed to their device) says. `others` are the
    addresses of processes that will meet rank 0 too."""
    calls.handshake(START_S)
    gpus = cluster.on_gpus()
    setup.cfg.trainer.device = "cuda" if gpus else "cpu"
    setup.threads = None if gpus else cluster.threads()
    setup.one_host = len({*calls.addresses, *others}) == 1
    setup.devices = tuple(calls.devices)
    setup.search_path = tuple(os.path.abspath(folder) for folder in sys.path)
    setup.folder = os.getcwd()
    if len(calls) > 1 or others:
        address = "127.0.0.1" if setup.one_host else calls.addresses[0]
        setup.store = calls.one(0, "open_store", address)
    calls.all("build", ray.put(setup))


class _Stored:
    """The dealt parts of one batch, and which tensors they were made of."""

    def __init__(
        self, key: list[tuple[str, torch.Tensor, int]], rows: list[list[int]], refs: list[Any]
    ) -> None:
        self.rows, self.refs = rows, refs
        self._key = key

    def same(self, key: list[tuple[str, torch.Tensor, int]]) -> bool:
        return len(key) == len(self._key) and all(
            name == mine and tensor is held and version == seen
            for (name, tensor, version), (mine, held, seen) in zip(key, self._key, strict=True)
        )
