"""Generation over many processes as one rollout engine: requests are dealt out, and change hands as ranks get free.

What always holds: a rank that finishes early takes what others have not started (`dealing`); the tokens do not depend
on which rank drew them, because every draw is keyed by request; every sample is answered once, also when it is called
off; whoever leaves `generate` early leaves no rank that still generates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from verl.errors import RolloutError
from verl.rollout.base import BatchEngine, Request, Response
from verl.workers.ray_actor import RankActor, RankProcess
from verl.workers.ray_calls import RankCalls
from verl.workers.request_scheduler import RequestScheduler

ABORT_S = 5.0
"""How long a healthy rank takes at most to hear that something is called off; one that does not answer is noticed by
whoever waits for its responses."""


class GeneratingActor(RankProcess):
    """An actor that can be told to stop while it generates."""

    @ray.method(concurrency_group="control")
    def abort(self, number: int, request_ids: list[str] | None) -> bool:
        worker: Any = self._worker
        return bool(worker.generating.abort(number, request_ids))


class GeneratingRankActor(GeneratingActor, RankActor):
    """A rank of the trainer that generates too."""


class SpreadRollout(BatchEngine):
    """Sends requests to the ranks' engines and yields their responses as they finish.

    `hosts` are the ranks that have one; `shared` says that the ranks also train, so that generation is opened and
    closed on all of them. `publish` brings new weights to the engines."""

    def __init__(
        self,
        calls: RankCalls,
        max_num_seqs: int,
        *,
        hosts: Sequence[int],
        shared: bool,
        publish: Callable[[int], None],
    ) -> None:
        self._calls = calls
        self._max_num_seqs = max_num_seqs
        self._hosts, self._shared, self._publish = list(hosts), shared, publish
        self.version = 0
        self.answered: Counter[int] = Counter()
        """Of the last `generate`: responses by the rank that finished them."""
        self._deal: RequestScheduler | None = None
        self._busy = False

    # -- generating ---------------------------------------------------------------------------------------------

    def run_batch(self, requests: list[Request]) -> Iterator[Response]:
        self._refuse_a_second()
        self._deal = RequestScheduler(requests, len(self._hosts), self._max_num_seqs, self.version)
        return self._generate(self._deal)

    def _refuse_a_second(self) -> None:
        if self._busy:
            raise RolloutError("these ranks are generating already; finish or close that generate first")

    def _generate(self, deal: RequestScheduler) -> Iterator[Response]:
        self._refuse_a_second()
        self._busy, self._deal = True, deal
        try:
            if self._shared:
                self._calls.all("open_generation")
            yield from self._run(deal)
        finally:
            self._busy, self._deal = False, None
            if self._shared and not self._broken():
                self._calls.all("close_generation")

    def _run(self, deal: RequestScheduler) -> Iterator[Response]:
        self.answered = Counter()
        running: dict[Any, int] = {}
        try:
            self._employ(deal, running)
            yield from deal.unwanted()
            while running:
                for stream in self._calls.ready("generate", running):
                    yield from self._next_of(stream, deal, running)
                self._employ(deal, running)
                yield from deal.unwanted()
        finally:
            if running and not self._broken():
                self._stop(deal, running)

    def _next_of(self, stream: Any, deal: RequestScheduler, running: dict[Any, int]) -> list[Response]:
        """What a rank has answered."""
        rank = running[stream]
        try:
            outcome = ray.get(next(stream))
        except StopIteration:
            del running[stream]
            deal.done(rank)
            return []
        except RayError as error:
            self._calls.fail("generate", rank, error, running)
        found = deal.answered(rank, self._calls.value_of("generate", rank, outcome, running))
        self.answered[rank] += len(found)
        return found

    def _employ(self, deal: RequestScheduler, running: dict[Any, int]) -> None:
        """Whoever is free takes what waits; when nothing does, others are asked for what they have not begun."""
        busy = set(running.values())
        idle = []
        for rank in self._hosts:
            part = None if rank in busy else deal.next_part(rank)
            if part is not None:
                actor, requests = self._calls.actors[rank], list(part.requests.values())
                stream = actor.stream.options(num_returns="streaming").remote(
                    "generate", requests, part.number
                )
                running[stream] = rank
            elif rank not in busy:
                idle.append(rank)
        while running and (taken := deal.steal(len(idle))) is not None:
            rank, names = taken
            self._calls.actors[rank].abort.remote(deal.numbers()[rank], names)

    # -- stopping -----------------------------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Also from another thread than the one that reads the responses."""
        deal = self._deal
        if deal is None:
            return
        named = None if request_ids is None else list(request_ids)
        deal.cancel(named)
        if not all(self._tell(deal, named)):
            raise NotImplementedError(
                "the engine of these ranks cannot abort what it has begun; what waits is called off"
            )

    def _stop(self, deal: RequestScheduler, running: dict[Any, int]) -> None:
        """Nobody wants the rest: end what runs, and hear it out until every rank is free."""
        deal.cancel(None)
        self._tell(deal, None)
        while running:
            for stream in self._calls.ready("generate", running):
                self._next_of(stream, deal, running)

    def _tell(self, deal: RequestScheduler, request_ids: list[str] | None) -> list[bool]:
        """What those of the ranks at work answer that hear it in time."""
        asked = [
            self._calls.actors[rank].abort.remote(number, request_ids)
            for rank, number in deal.numbers().items()
        ]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ABORT_S) if asked else ([], [])
        found = []
        for ref in answered:
            try:
                found.append(bool(ray.get(ref)))
            except RayError:
                continue  # gone: whoever waits for its responses says so
        return found

    def _broken(self) -> bool:
        """After an error nothing more is asked of ranks, nor of those that work with them."""
        return self._calls.broken or any(fellow.broken for fellow in self._calls.peers)

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, source: Any, version: int) -> None:
        """The ranks' engines take the weights of the ranks' actor."""
        self._publish(version)
        self.version = version
