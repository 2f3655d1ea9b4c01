"""The engines of many rank processes as one `RolloutEngine`, and the processes that only generate.

The tokens of a request do not depend on the rank that generates them, because every draw is keyed by the request.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError

from verl.config.parallelism import ROLLOUT
from verl.errors import RolloutError
from verl.observe.live import live
from verl.rollout.base import Request, Response, RolloutEngine, RolloutStats
from verl.rollout.weight_sync.fingerprint import compare
from verl.rollout.weight_sync.probe import ProbeCheck, worst
from verl.workers.ray_calls import STATUS_S, RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.rollout_rank import RequestScheduler, RolloutRank, RolloutServer
from verl.workers.train_rank import RankGroup, RankInfo, TrainRank

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig
    from verl.rollout.weight_sync.broadcast import SyncReport
    from verl.workers.rank import RankSetup

logger = logging.getLogger(__name__)

_ADVICE = (
    f"generate on the trainer's GPUs ({ROLLOUT}.nnodes=0 {ROLLOUT}.n_gpus_per_node=0) if it happens again"
)
ABORT_S = 5.0
"""How long a healthy rank takes at most to answer an abort; one that does not is noticed by `poll`."""
_SUMMED = (
    *("kv_blocks_used", "kv_blocks", "generated_tokens", "prefilled_tokens", "prompts", "prompt_passes"),
    "preemptions",
)
SUBMIT_S = 0.2
"""How soon `poll` sends on requests that another thread submitted while it waits."""


class RayRollout(RolloutEngine):
    """Sends requests to the least loaded rank and returns responses as they finish; `poll` does the sending. In a pool,
    the thread that polls need not be the one that trains and sends weights.

    `hosts` are the ranks that have an engine. `colocated`: the ranks also train, so that their weights are gathered
    while requests are outstanding, and released after. Weights come from `RayGroup.sync_weights`."""

    def __init__(self, calls: RankCalls, max_num_seqs: int, *, hosts: Sequence[int], colocated: bool) -> None:
        self._calls = calls
        self._hosts, self._colocated = list(hosts), colocated
        self._lock = threading.RLock()
        """Held while requests and aborts are sent: a rank hears of them in this order."""
        self._scheduler = RequestScheduler(self._hosts, max_num_seqs)
        self._submissions: Counter[int] = Counter()
        """Sent to each rank so far."""
        self._aborted: list[Response] = []
        """Answers to requests that were aborted before a rank had them."""
        self._streams: dict[Any, int] = {}
        self._open = self._held = False
        self._heard = 0.0
        self._version = 0
        self.answered: Counter[int] = Counter()
        """Responses by the rank that generated them."""

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request]) -> None:
        with self._lock:
            self._scheduler.submit(list(requests))

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._idle():
            self._heard = time.monotonic()  # streams that are to end have not been looked at since
        try:
            while True:
                with self._lock:
                    responses, self._aborted = self._aborted, []
                    self.dispatch()
                live.set("sequences_waiting", self._scheduler.waiting)  # at no rank yet
                if not self._streams:
                    return responses
                left = SUBMIT_S if deadline is None else max(0.0, min(SUBMIT_S, deadline - time.monotonic()))
                responses += self._receive(0.0 if responses else left)
                if self._idle():
                    # All is answered: the streams end now, those of a pool after a weight sync that is in progress.
                    while self._colocated and self._streams:
                        self._receive(SUBMIT_S)
                    if not self._held:
                        self._close_generation()
                if responses or (deadline is not None and time.monotonic() >= deadline):
                    return responses
        except BaseException:
            with self._lock:
                self._scheduler.clear()
            self._streams, self._aborted = {}, []
            raise

    def dispatch(self) -> None:
        """Send what ranks can take, and open the streams in which they answer."""
        batches = self._scheduler.dispatch()
        if batches and not self._open:
            if self._colocated:
                self._calls.all(RankGroup.open_generation)
            self._open, self.answered = True, Counter()
        for rank, requests in batches.items():
            self._calls.control(rank, RolloutServer.control_submit, requests)
            self._submissions[rank] += 1
            self._heard = time.monotonic()
        running = set(self._streams.values())
        for rank, load in self._scheduler.loads.items():
            if load and rank not in running:
                stream = self._calls.open_stream(rank, RolloutServer.do_generate, self._submissions[rank])
                self._streams[stream] = rank
                self._heard = time.monotonic()

    def _idle(self) -> bool:
        with self._lock:
            return self._scheduler.idle and not self._aborted

    def _receive(self, timeout_s: float) -> list[Response]:
        received: list[Response] = []
        for stream in self._calls.ready("generate", self._streams, timeout_s, self._heard):
            self._heard = time.monotonic()
            rank = self._streams[stream]
            for responses in self._calls.read("generate", stream, self._streams):
                with self._lock:
                    self._scheduler.answered(rank, len(responses))
                self.answered[rank] += len(responses)
                received += responses
        return received

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Ranks keep gathered weights and KV blocks to the end of this block: between the turns of conversations there
        are moments when nothing is outstanding."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if not self._colocated or not self._streams:
                self._close_generation()

    def _close_generation(self) -> None:
        if self._open:
            self._open = False
            if self._colocated and not self._broken():
                self._calls.all(RankGroup.close_generation)

    def _broken(self) -> bool:
        """After an error nothing more is asked of the ranks, nor of those that work with them."""
        return self._calls.broken or any(peer.broken for peer in self._calls.peers)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        named = None if request_ids is None else list(request_ids)
        with self._lock:
            self._aborted += [
                Response(request.request_id, sample, [], [], "abort", self._version)
                for request in self._scheduler.cancel(None if named is None else set(named))
                for sample in range(request.n)
            ]
            busy = [rank for rank, load in self._scheduler.loads.items() if load]
            refs = [self._calls.control(rank, RolloutServer.control_abort, named) for rank in busy]
        if not all(_answers(refs, ABORT_S)):
            raise NotImplementedError(
                "the ranks' engine cannot abort what it has started; waiting requests are aborted"
            )

    def release(self, prefix_ids: Iterable[str]) -> None:
        with self._lock:
            for rank, names in self._scheduler.release(list(prefix_ids)).items():
                self._calls.control(rank, RolloutServer.control_release, names)

    def stats(self) -> RolloutStats:
        """Sums over the ranks that answer in time."""
        with self._lock:
            waiting = self._scheduler.waiting + len(self._aborted)
            total = RolloutStats(running=sum(self._scheduler.loads.values()), waiting=waiting)
        if self._broken():
            return total
        refs = [self._calls.control(rank, RolloutServer.control_stats) for rank in self._hosts]
        for stats in _answers(refs, STATUS_S):
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(stats, name))
        return total

    # -- weights ------------------------------------------------------------------------------------------------

    def weights_updated(self, version: int) -> None:
        """The ranks' engines have new weights (`RayGroup.sync_weights`)."""
        self._version = version
        if self._colocated:
            # Elsewhere conversations may be running, and what their ranks have kept since is released by rank.
            with self._lock:
                self._scheduler.forget_prefixes()

    def update_weights(self, source: Any, version: int) -> None:
        raise RolloutError("engines on Ray take weights from their ranks; use WorkerGroup.sync_weights")


def _answers(refs: list[Any], timeout_s: float) -> list[Any]:
    """Of ranks that answer in time; a dead rank is noticed by `poll`."""
    answered, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    values = []
    for ref in answered:
        try:
            values.append(ray.get(ref))
        except RayError:
            continue
    return values


class RolloutPool:
    """Engines in separate processes, behind `calls`."""

    def __init__(self, cfg: PPOConfig) -> None:
        self.cluster = Cluster(cfg, ROLLOUT)
        self._watchdog_s = cfg.trainer.watchdog_s
        self._probes: dict[str, ProbeCheck] = {}

    def start_actors(self, timeout_s: float) -> None:
        """Start the processes."""
        actors = self.cluster.start_actors(timeout_s, "verl.workers.rollout_rank:RolloutRank")
        self.calls = RankCalls(actors, self._watchdog_s, "rollout rank")
        self.calls.handshake(timeout_s)

    def build(self, trainer: RankCalls, setup: RankSetup[PPOConfig], info: RankInfo) -> None:
        """Start the engines (the trainer's ranks have been built with `setup`) and connect both sides."""
        own = copy.copy(setup)
        own.threads = None if setup.threads is None else self.cluster.threads()
        assert info.model is not None
        self.calls.all(RolloutRank.do_build, ray.put(own), info.model, info.adapter)
        self._trainer = trainer
        RankCalls.together(trainer, self.calls).all(TrainRank.do_link, 1 + len(self.calls))
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
        # Both kinds of process serve it: the trainer's first rank says what was sent, the others what arrived.
        sent, *found = self._sync_calls.each(TrainRank.do_sync_weights, [(version,)] * len(self._sync_calls))
        arrivals = cast("list[SyncReport]", found[len(self._trainer) - 1 :])
        assert sent is not None
        by_name = dict(zip(self.calls.names, arrivals, strict=True))
        for name, arrival in by_name.items():
            compare(sent, arrival.received, version, name, _ADVICE)
        probed = {name: arrival for name, arrival in by_name.items() if arrival.tokens}
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
        return self.calls.broken or self._sync_calls.broken

    def close(self, seconds: float, *, ask: bool) -> None:
        """End them, after letting the engines close where that can be asked for."""
        if ask:
            self.calls.shutdown(seconds)
        self.cluster.close()
