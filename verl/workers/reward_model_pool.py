"""A reward model in processes of its own on Ray, one whole copy in each.

Every submitted response is scored once, by whichever process is free first, while others are still being generated.
A process that dies, hangs or raises ends the run with its role, rank and host.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.parallelism import rollout_pool, world_size
from verl.errors import TrainingHalted, VerlError
from verl.reward.base import Backend, RewardResult, RewardSample
from verl.reward.functions import Signature
from verl.reward.model import check_path, estimated_work, next_share
from verl.workers.rank_process import remote_rank_process
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.reward_model_server import ROLE, ModelFacts, ModelSetup

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig

_log = logging.getLogger(__name__)

KEY = "reward.reward_model"
_SERVER = "verl.workers.reward_model_server:RewardModelRank"
START_S = 300.0
"""For processes to start and a cluster to free resources; loading the model is under the watchdog instead."""
END_S = 30.0
"""For the threads that wait for a process that was ended."""


@dataclass
class Waiting:
    """A response that waits for a process."""

    key: Hashable
    position: int
    sample: RewardSample
    work: int


class ModelPool:
    """The processes, with the model loaded."""

    def __init__(self, run: PPOConfig) -> None:
        self._run = run
        self.cluster = Cluster(run, KEY)
        self._kept_free: list[Any] = []
        try:
            self.cluster.connect()
            self.actors = self._place()
            self.calls = RankCalls(self.actors, run.trainer.watchdog_s, ROLE)
            self.calls.handshake(START_S)
            self.facts = self._build()
        except BaseException:
            self.close()
            raise

    def _place(self) -> list[Any]:
        ours = _gpus_outside_ray(self._run) if self.cluster.on_gpus() else []
        self._kept_free = spare = _on_this_node(len(ours))
        placed = self.cluster.place(START_S, _SERVER)
        if not spare:
            return placed
        # Ray does not know which GPUs this process and its server use: more are asked for than needed, and whoever got
        # one of those holds it without using it.
        everyone = [*placed, *spare]
        calls = RankCalls(everyone, self._run.trainer.watchdog_s, ROLE)
        calls.handshake(START_S)
        here = ray.util.get_node_ip_address()
        holds_ours = [
            address == here and bool(set(gpus) & set(ours))
            for address, gpus in zip(calls.addresses, calls.all("gpus"), strict=True)
        ]
        free = [actor for actor, held in zip(everyone, holds_ours, strict=True) if not held]
        chosen = free[: len(placed)]
        for actor in free[len(placed) :]:
            ray.kill(actor)
        return chosen

    def _build(self) -> ModelFacts:
        config = self._run.reward.reward_model
        folder = Path(str(config.model_path)).expanduser()
        if folder.exists():  # the processes do not stand where this one does
            config = replace(config, model_path=str(folder.absolute()))
        setup = ray.put(
            ModelSetup(
                config=config,
                device="cuda" if self.cluster.on_gpus() else "cpu",
                search_path=tuple(os.path.abspath(folder) for folder in sys.path),
            )
        )
        facts: list[ModelFacts] = self.calls.each(
            "build", [(setup, rank) for rank in range(len(self.actors))]
        )
        _log.info(
            "reward model: %d processes of its own (%s.nnodes=%d, %s.n_gpus_per_node=%d)",
            len(self.actors),
            KEY,
            config.nnodes,
            KEY,
            config.n_gpus_per_node,
        )
        return facts[0]

    def watch(self) -> RankCalls:
        """Calls for one thread; `RankCalls` is not shared between threads."""
        own = RankCalls(self.actors, self.calls.watchdog_s, ROLE)
        own.names, own.logs, own.addresses = self.calls.names, self.calls.logs, self.calls.addresses
        return own

    def end(self) -> None:
        """End the processes; whoever waits for one hears of it."""
        for actor in {*self.cluster.actors, *self._kept_free}:
            ray.kill(actor)
        self.cluster.actors, self._kept_free = [], []

    def close(self) -> None:
        if ray.is_initialized():
            self.end()
        self.cluster.close()


class ModelPoolBackend(Backend):
    """The pool as one of a manager's rewards: a thread for each process hands it one share after the other."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._waiting: list[Waiting] = []
        self._open = 0
        self._results: dict[Hashable, list[RewardResult | None]] = {}
        self._failure: VerlError | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"reward-model-{rank}", daemon=True)
            for rank in range(len(pool.actors))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def for_run(cls, run: PPOConfig) -> ModelPoolBackend:
        """Start the processes the config asks for."""
        check_path(run.reward.reward_model)
        return cls(ModelPool(run))

    @property
    def signatures(self) -> list[Signature]:
        # Of one response, not of the batch: so each comes as soon as it is finished.
        return [Signature("reward_model", by_name=("prompt", "response"))]

    def submit(self, key: Hashable, function: int, samples: Sequence[RewardSample]) -> None:
        hidden_size = self._pool.facts.hidden_size
        with self._changed:
            self._raise_failure()
            self._results[key] = [None] * len(samples)
            for position, sample in enumerate(samples):
                # The model sees the conversation only; the rest need not travel.
                seen = replace(sample, ground_truth=None, extra_info={}, columns={})
                self._waiting.append(Waiting(key, position, seen, estimated_work(sample, hidden_size)))
            self._open += len(samples)
            self._changed.notify_all()

    def drain(self) -> dict[Hashable, list[RewardResult]]:
        with self._changed:
            while self._open and self._failure is None:
                self._changed.wait()
            self._raise_failure()
            found, self._results = self._results, {}
        return {key: [result for result in results if result is not None] for key, results in found.items()}

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if ray.is_initialized():
            self._pool.end()
        for thread in self._threads:
            thread.join(END_S)
        self._pool.close()

    # -- a thread for each process ------------------------------------------------------------------------------

    def _serve(self, rank: int) -> None:
        calls = self._pool.watch()
        while piece := self._next():
            try:
                results = calls.one(rank, "score", [item.sample for item in piece])
            except VerlError as error:
                return self._fail(error)
            except RayError as error:  # the connection to the cluster itself
                return self._fail(TrainingHalted(f"{calls.names[rank]}, in score: {error}"))
            self._answer(piece, results)
        return None

    def _next(self) -> list[Waiting]:
        """What this process scores next; nothing at the end."""
        with self._changed:
            while not self._waiting and self._failure is None and not self._closing:
                self._changed.wait()
            if self._failure is not None or self._closing:
                return []
            work = [item.work for item in self._waiting]
            chosen = next_share(work, len(self._threads), self._pool.facts.batch_size)
            piece = [self._waiting[position] for position in chosen]
            taken = set(chosen)
            self._waiting = [item for at, item in enumerate(self._waiting) if at not in taken]
            return piece

    def _answer(self, piece: list[Waiting], results: Sequence[RewardResult]) -> None:
        with self._changed:
            for item, result in zip(piece, results, strict=True):
                self._results[item.key][item.position] = result
            self._open -= len(piece)
            if not self._open:
                self._changed.notify_all()

    def _fail(self, error: VerlError) -> None:
        with self._changed:
            if self._failure is None and not self._closing:
                self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _gpus_outside_ray(run: PPOConfig) -> list[str]:
    """The GPUs of this process and of a rollout server it starts itself; none where the trainer's ranks are Ray's."""
    if world_size(run) > 1 or rollout_pool(run):
        return []
    count = 1 + run.actor_rollout_ref.rollout.n_gpus_per_node
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(number) for number in range(count)])[:count]


def _on_this_node(count: int) -> list[Any]:
    """So many further processes with a GPU each, beside this one; none where Ray has no GPUs to give here."""
    node = ray.get_runtime_context().get_node_id()
    resources: dict[str, float] = next((n["Resources"] for n in ray.nodes() if n["NodeID"] == node), {})
    count = min(count, int(resources.get("GPU", 0)))
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    actor_class = remote_rank_process()
    return [
        actor_class.options(num_cpus=0, num_gpus=1, scheduling_strategy=affinity).remote(
            _SERVER, number, count, None
        )
        for number in range(count)
    ]
