"""The processes that only generate, seen from the driver: placed, linked to the trainer, and given its weights.

After every weight sync all of them have what the trainer sent and compute what it computes, or the run stops.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import ray

from verl.config.parallelism import ROLLOUT
from verl.rollout.weight_sync.fingerprint import compare
from verl.rollout.weight_sync.probe import ProbeCheck, worst
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.rollout.weight_sync.broadcast import SyncReport
    from verl.workers.rank import RankSetup

logger = logging.getLogger(__name__)

_ADVICE = (
    f"generate on the trainer's GPUs ({ROLLOUT}.nnodes=0 {ROLLOUT}.n_gpus_per_node=0) if it happens again"
)


class RolloutPool:
    """Engines in processes of their own, behind `calls`."""

    def __init__(self, cfg: PPOConfig) -> None:
        self.cluster = Cluster(cfg, ROLLOUT)
        self._watchdog_s = cfg.trainer.watchdog_s
        self._probes: dict[str, ProbeCheck] = {}
        self.calls: RankCalls
        self._everyone: RankCalls
        self._trainer: RankCalls

    def place(self, timeout_s: float) -> None:
        """Start the processes."""
        actors = self.cluster.place(timeout_s, "verl.workers.rollout_rank:RolloutRank")
        self.calls = RankCalls(actors, self._watchdog_s, "rollout rank")
        self.calls.handshake(timeout_s)

    def build(self, trainer: RankCalls, setup: RankSetup[PPOConfig]) -> None:
        """Start the engines (the trainer's ranks have been built with `setup`) and connect both sides."""
        info, adapter = trainer.all("model_info")[0], trainer.all("adapter")[0]
        own = copy.copy(setup)
        own.threads = None if setup.threads is None else self.cluster.threads()
        self.calls.all("build", ray.put(own), info, adapter)
        self._trainer = trainer
        self._everyone = RankCalls.together(trainer, self.calls)
        self._everyone.all("link", 1 + len(self.calls))
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

    def sync_weights(self, version: int) -> None:
        """The trainer's weights to all of them, as policy `version`; compared by fingerprint and by log-probs."""
        sent, *found = self._everyone.all("sync_weights", version)
        arrivals: list[SyncReport] = found[len(self._trainer) - 1 :]
        for name, arrival in zip(self.calls.names, arrivals, strict=True):
            compare(sent, arrival.received, version, name, _ADVICE)
        prompt, answers = arrivals[0].prompt, list({arrival.tokens for arrival in arrivals})
        known = dict(zip(answers, self._trainer.all("probe", prompt, answers)[0], strict=True))
        for name, arrival in zip(self.calls.names, arrivals, strict=True):
            check = self._probes.setdefault(name, ProbeCheck(name, arrival.precision, _ADVICE))
            check.add(version, arrival.log_probs, known[arrival.tokens])

    def metrics(self) -> dict[str, float]:
        """Of the last update of the weights; of several processes, the worst."""
        return worst([check.metrics() for check in self._probes.values()])

    def broken(self) -> bool:
        """Whether a call to these processes, alone or together with the trainer's, has failed."""
        parts: list[Any] = [getattr(self, name, None) for name in ("calls", "_everyone")]
        return any(part is not None and part.broken for part in parts)

    def close(self, seconds: float, *, ask: bool) -> None:
        """End them, after letting the engines close where that can be asked for."""
        if ask and hasattr(self, "calls"):
            self.calls.shutdown(seconds)
        self.cluster.close()
