"""A reward model in separate processes on Ray, one full copy in each.

Every submitted response is scored once, by whichever process is free first, while others are still being generated.
A process that dies, hangs or raises ends the run with its role, rank and host.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.config.parallelism import rollout_pool, world_size
from verl.errors import TrainingHalted, VerlError
from verl.reward.base import Backend, Call, RewardResult, RewardSample, answer, fail, new_call
from verl.reward.functions import Signature
from verl.reward.model import RewardModel, check_path, estimated_work, next_share
from verl.workers.rank import RPCServer
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_daemons import ray_lost, remote_rank_process

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.config.sections.reward import RewardModelConfig

_log = logging.getLogger(__name__)

KEY = "reward.reward_model"
ROLE = "reward model rank"
_SERVER = "verl.workers.reward_model_pool:RewardModelRank"
START_S = 300.0
"""For processes to start and a cluster to free resources; loading the model is under the watchdog instead."""
END_S = 30.0
"""For a thread to notice that its process ended."""


@dataclass(eq=False)
class Waiting:
    """A response that waits for a process."""

    call: Call
    position: int
    sample: RewardSample
    work: int


class ModelPool:
    """The processes, with the model loaded."""

    def __init__(self, run: PPOConfig) -> None:
        check_path(run.reward.reward_model)
        self._run = run
        self.cluster = Cluster(run, KEY)
        self._kept_free: list[Any] = []
        try:
            self.cluster.connect()
            self.actors = self._start_actors()
            self.calls = RankCalls(self.actors, run.trainer.watchdog_s, ROLE)
            self.calls.handshake(START_S)
            self.load_model()
        except BaseException:
            self.close()
            raise

    def _start_actors(self) -> list[Any]:
        ours = _gpus_outside_ray(self._run) if self.cluster.on_gpus() else []
        self._kept_free = spare = _on_this_node(len(ours))
        started = self.cluster.start_actors(START_S, _SERVER)
        if not spare:
            return started
        # Ray does not know which GPUs this process and its server use: more are reserved than needed, and a process
        # that got one of those only reserves it.
        reserved = [*started, *spare]
        calls = RankCalls(reserved, self._run.trainer.watchdog_s, ROLE)
        calls.handshake(START_S)
        here = ray.util.get_node_ip_address()
        on_ours = [
            address == here and bool(set(gpus) & set(ours))
            for address, gpus in zip(calls.addresses, calls.all(RewardModelRank.do_gpus), strict=True)
        ]
        free = [actor for actor, ours_too in zip(reserved, on_ours, strict=True) if not ours_too]
        chosen = free[: len(started)]
        for actor in free[len(started) :]:
            ray.kill(actor)
        return chosen

    def load_model(self) -> None:
        config = self._run.reward.reward_model
        folder = Path(str(config.model_path)).expanduser()
        if folder.exists():  # the processes have another working directory
            config = replace(config, model_path=str(folder.absolute()))
        search_path = tuple(os.path.abspath(folder) for folder in sys.path)
        setup = config, "cuda" if self.cluster.on_gpus() else "cpu", search_path
        sizes = self.calls.each(
            RewardModelRank.do_build, [(*setup, rank) for rank in range(len(self.actors))]
        )
        self.hidden_size, self.batch_size = sizes[0]
        _log.info(
            "reward model: %d separate processes (%s.nnodes=%d, %s.n_gpus_per_node=%d)",
            len(self.actors),
            KEY,
            config.nnodes,
            KEY,
            config.n_gpus_per_node,
        )

    def end(self) -> None:
        """End the processes; calls that wait for one fail."""
        for actor in {*self.cluster.actors, *self._kept_free}:
            ray.kill(actor)
        self.cluster.actors, self._kept_free = [], []

    def close(self) -> None:
        if ray.is_initialized() and not ray_lost():
            self.end()
        self.cluster.close()


class ModelPoolBackend(Backend):
    """The pool as one of a manager's rewards: a thread for each process gives it a share and takes the results."""

    # Of one response, not of the batch: so each comes as soon as it is finished.
    signatures = (Signature("reward_model", by_name=("prompt", "response")),)

    def __init__(self, pool: ModelPool) -> None:
        self.pool = pool
        self.scored: Counter[int] = Counter()
        """Responses by the process that scored them."""
        self._changed = threading.Condition()
        self._waiting: list[Waiting] = []
        self._unanswered: dict[Call, list[RewardResult | None]] = {}
        """The results that each call has so far."""
        self._failure: VerlError | None = None
        self._closing = False
        names = [f"reward-model-{rank}" for rank in range(len(pool.actors))]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=name, daemon=True)
            for rank, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: int, samples: Sequence[RewardSample]) -> Call:
        hidden_size, call = self.pool.hidden_size, new_call(samples)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._unanswered[call] = [None] * len(samples)
            for position, sample in enumerate(samples):
                # The model sees the conversation only; the rest need not be sent.
                seen = replace(sample, ground_truth=None, extra_info={}, columns={})
                self._waiting.append(Waiting(call, position, seen, estimated_work(sample, hidden_size)))
            self._changed.notify_all()
        return call

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if ray.is_initialized():
            self.pool.end()
        for thread in self._threads:
            thread.join(END_S)
        self.pool.close()

    # -- in the threads -----------------------------------------------------------------------------------------

    def _serve(self, rank: int) -> None:
        try:
            while share := self._next_share():
                samples = [item.sample for item in share]
                self._add_results(rank, share, self.pool.calls.one(rank, RewardModelRank.do_score, samples))
        except (VerlError, RayError) as error:  # RayError: the connection to the cluster itself
            with self._changed:
                if self._closing or self._failure is not None:
                    return
                self._failure = error if isinstance(error, VerlError) else TrainingHalted(str(error))
                self._changed.notify_all()
                fail(self._unanswered, self._failure)

    def _next_share(self) -> list[Waiting]:
        """Waits until there is one; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing or self._failure)
            if self._closing or self._failure is not None:
                return []
            work = [item.work for item in self._waiting]
            chosen = next_share(work, len(self.pool.actors), self.pool.batch_size)
            share = [self._waiting[position] for position in chosen]
            taken = set(share)
            self._waiting = [item for item in self._waiting if item not in taken]
            return share

    def _add_results(self, rank: int, share: list[Waiting], results: Sequence[RewardResult]) -> None:
        with self._changed:
            for item, result in zip(share, results, strict=True):
                self._unanswered[item.call][item.position] = result
            self.scored[rank] += len(share)
            for call in {item.call for item in share}:
                known = [result for result in self._unanswered[call] if result is not None]
                if len(known) == len(self._unanswered[call]) and self._failure is None:
                    del self._unanswered[call]
                    answer(call, known)


def _gpus_outside_ray(run: PPOConfig) -> list[str]:
    """The GPUs of this process and of a rollout server it starts itself; none where the trainer's ranks are Ray's."""
    if world_size(run) > 1 or rollout_pool(run):
        return []
    count = 1 + run.actor_rollout_ref.rollout.n_gpus_per_node
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(number) for number in range(count)])[:count]


def _on_this_node(count: int) -> list[Any]:
    """`count` more processes on this node with a GPU each; none where Ray has no GPUs to give here."""
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


class RewardModelRank(RPCServer):
    """Loads the model once and scores what it is given."""

    role = ROLE
    _model: RewardModel | None = None

    def do_gpus(self) -> list[str]:
        """The GPUs this process may use, as Ray numbers them."""
        return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]

    def do_build(
        self, config: RewardModelConfig, device: str, search_path: Sequence[str], rank: int
    ) -> tuple[int, int]:
        """Load the model; its hidden and batch sizes, by which work is shared out."""
        self.rank = self.watchdog.rank = rank
        sys.path += [folder for folder in search_path if folder not in sys.path]
        self._model = RewardModel.from_config(config, device)
        self._model.onload()
        text = self._model.model.config.get_text_config()
        return int(getattr(text, "hidden_size", 1024)), self._model.batch_size

    def do_score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        assert self._model is not None
        return self._model.results(samples)

    def do_close(self) -> None:
        self._model = None
