"""Generation over many processes as one rollout engine: a queue of prompts that ranks take from as they get free.

What always holds: a prompt that no engine has room for waits in the queue until a rank is free for it, so a rank
that finishes early takes what others have not started; the tokens do not depend on which rank drew them, because
every draw is keyed by request; every sample is answered once, also when it is called off; whoever leaves `generate`
early leaves no rank that still generates.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from verl.errors import RolloutError
from verl.rollout.base import Request, Response, RolloutEngine
from verl.workers.generating import CalledOff, unstarted
from verl.workers.ray_actor import RankActor, ServingActor
from verl.workers.ray_calls import RankCalls
from verl.workers.shares import pieces

ABORT_S = 5.0
"""How long a healthy rank takes at most to hear that something is called off; one that does not answer is noticed by
whoever waits for its responses."""


class GeneratingActor(ServingActor):
    """An actor that can be told to stop while it generates."""

    @ray.method(concurrency_group="control")
    def abort(self, number: int, request_ids: list[str] | None) -> bool:
        worker: Any = self._worker
        return bool(worker.generating.abort(number, request_ids))


class GeneratingRankActor(GeneratingActor, RankActor):
    """A rank of the trainer that generates too."""


class _Call:
    """One `generate`: what waits, and what was called off. Touched by the consumer and by whoever aborts."""

    def __init__(self, number: int, requests: list[Request], cut: Iterable[range]) -> None:
        self.number = number
        self._lock = threading.Lock()
        self._off = CalledOff()
        self._waiting = deque(requests[piece.start : piece.stop] for piece in cut)
        self._passed_over: list[Request] = []

    def call_off(self, request_ids: Collection[str] | None) -> None:
        with self._lock:
            self._off.add(request_ids)

    def next_piece(self) -> list[Request]:
        """What a free rank takes; nothing when nothing waits that is still wanted."""
        with self._lock:
            while self._waiting:
                wanted = self._parted(self._waiting.popleft())
                if wanted:
                    return wanted
            return []

    def unwanted(self) -> list[Request]:
        """What waited and was called off; each is given out once."""
        with self._lock:
            if self._off:
                self._waiting = deque(self._parted(piece) for piece in self._waiting)
            found, self._passed_over = self._passed_over, []
            return found

    def _parted(self, piece: list[Request]) -> list[Request]:
        """Those still wanted; the others are put aside."""
        self._passed_over += [request for request in piece if request.request_id in self._off]
        return [request for request in piece if request.request_id not in self._off]


class SpreadRollout(RolloutEngine):
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
        self.taken: list[int] = []
        """Of the last `generate`: requests each host took."""
        self._numbers = itertools.count()
        self._call: _Call | None = None
        self._busy = False

    # -- generating ---------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        requests = list(requests)
        self._refuse_a_second()
        capacity = max(1, self._max_num_seqs // max((request.n for request in requests), default=1))
        self._call = _Call(next(self._numbers), requests, pieces(len(requests), len(self._hosts), capacity))
        return self._generate(self._call)

    def _refuse_a_second(self) -> None:
        if self._busy:
            raise RolloutError("these ranks are generating already; finish or close that generate first")

    def _generate(self, call: _Call) -> Iterator[Response]:
        self._refuse_a_second()
        self._busy, self._call = True, call
        try:
            if self._shared:
                self._calls.all("open_generation")
            yield from self._run(call)
        finally:
            self._busy, self._call = False, None
            if self._shared and not self._broken():
                self._calls.all("close_generation")

    def _run(self, call: _Call) -> Iterator[Response]:
        self.taken = [0] * len(self._hosts)
        running: dict[Any, int] = {}
        try:
            for rank in self._hosts:
                self._give(rank, call, running)
            yield from self._unwanted(call)
            while running:
                for stream in self._calls.ready("generate", running):
                    yield from self._next_of(stream, call, running)
                yield from self._unwanted(call)
        finally:
            if running and not self._broken():
                self._stop(call, running)

    def _next_of(self, stream: Any, call: _Call, running: dict[Any, int]) -> list[Response]:
        """What a rank has answered; one that is through gets more to do."""
        rank = running[stream]
        try:
            outcome = ray.get(next(stream))
        except StopIteration:
            del running[stream]
            self._give(rank, call, running)
            return []
        except RayError as error:
            self._calls.fail("generate", rank, error, running)
        found: list[Response] = self._calls.value_of("generate", rank, outcome, running)
        return found

    def _give(self, rank: int, call: _Call, running: dict[Any, int]) -> None:
        piece = call.next_piece()
        if piece:
            actor = self._calls.actors[rank]
            stream = actor.stream.options(num_returns="streaming").remote("generate", piece, call.number)
            running[stream] = rank
            self.taken[self._hosts.index(rank)] += len(piece)

    def _unwanted(self, call: _Call) -> Iterator[Response]:
        for request in call.unwanted():
            yield from unstarted(request, self.version)

    # -- stopping -----------------------------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Also from another thread than the one that reads the responses."""
        call = self._call
        if call is None:
            return
        named = None if request_ids is None else list(request_ids)
        call.call_off(named)
        if not all(self._tell(call, self._hosts, named)):
            raise NotImplementedError(
                "the engine of these ranks cannot abort what it has begun; what waits is called off"
            )

    def _stop(self, call: _Call, running: dict[Any, int]) -> None:
        """Nobody wants the rest: end what runs, and hear it out until every rank is free."""
        call.call_off(None)
        self._tell(call, sorted(set(running.values())), None)
        while running:
            for stream in self._calls.ready("generate", running):
                self._next_of(stream, call, running)

    def _tell(self, call: _Call, ranks: Sequence[int], request_ids: list[str] | None) -> list[bool]:
        """What those ranks answer that hear it in time."""
        asked = [self._calls.actors[rank].abort.remote(call.number, request_ids) for rank in ranks]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ABORT_S)
        found = []
        for ref in answered:
            try:
                found.append(bool(ray.get(ref)))
            except RayError:
                continue  # gone: whoever waits for its responses says so
        return found

    def _broken(self) -> bool:
        """After an error nothing more is asked of ranks, nor of those that work with them."""
        return self._calls.broken or any(fellow.broken for fellow in self._calls.fellows)

    # -- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, source: Any, version: int) -> None:
        """The ranks' engines take the weights of the ranks' actor."""
        self._publish(version)
        self.version = version
