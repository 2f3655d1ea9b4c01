"""One process's side of generation: drives its `RolloutEngine` for the driver, which may send more meanwhile.

Every sample of an accepted request is answered exactly once. Requests and aborts arrive from a control thread, aborts
possibly before the requests they name; after a stream ends its engine generates nothing. New weights are taken by the
thread that generates, between two polls.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from verl.rollout.base import Request, Response, RolloutEngine, RolloutStats
from verl.workers.request_scheduler import aborted
from verl.workers.rpc_server import Outcome, RPCServer

Result = TypeVar("Result")

FLUSH_S = 0.02
"""Responses that finish this soon after others were sent are sent together: sending costs a quarter of a millisecond
in which nothing is generated."""
POLL_S = 0.05
"""How often new requests are noticed while the engine runs."""


class GenerationStream:
    """`run` is called from one thread, the rest from others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[tuple[Future[Any], Callable[[], Any]]] = []
        """To be done between two polls."""
        self._working_elsewhere = False
        """Such work runs in its caller's thread, because no stream ran."""
        self._work_ended = threading.Condition(self._lock)
        self._kept: list[Response] = []
        """Polled by such work, to be returned by the stream."""
        self._engine: RolloutEngine | None = None
        self._inbox: list[tuple[int, list[Request]]] = []
        self._missing: Counter[str] = Counter()
        self._aborted: dict[str, int] = {}
        """By request: the dispatch up to which it was aborted."""

    def submit(self, number: int, requests: list[Request]) -> bool:
        """Add requests to the stream that runs. False: none does, and nothing was added."""
        with self._lock:
            if self._engine is None:
                return False
            self._inbox.append((number, requests))
            return True

    def abort(self, number: int, request_ids: Collection[str]) -> bool:
        """Abort requests of dispatches up to `number`. False: the engine cannot abort what it has started."""
        with self._lock:
            for name in request_ids:
                self._aborted[name] = max(number, self._aborted.get(name, number))
            started = [name for name in request_ids if self._missing[name] > 0]
            if self._engine is None or not started:
                return True
            try:
                self._engine.abort(started)
            except NotImplementedError:
                return False
            return True

    def between_polls(self, work: Callable[[], Result]) -> Result:
        """What `work` returns. It runs in the stream's thread between two polls; without a stream, in this thread, and
        a stream that is opened meanwhile waits for it. A stream does not end before work it was given."""
        answer: Future[Result] = Future()
        with self._lock:
            self._work_ended.wait_for(lambda: not self._working_elsewhere)
            running = self._engine is not None
            if running:
                self._work.append((answer, work))
            else:
                self._working_elsewhere = True
        if running:
            try:
                return answer.result()
            except CancelledError:  # the stream broke off before
                return self.between_polls(work)
        try:
            return work()
        finally:
            with self._lock:
                self._working_elsewhere = False
                self._work_ended.notify_all()

    def keep(self, responses: list[Response]) -> None:
        """For work between polls that polls the engine itself: the stream returns these."""
        self._kept += responses

    def run(
        self, engine: RolloutEngine, number: int, requests: list[Request], version: Callable[[], int]
    ) -> Iterator[list[Response]]:
        """Yield responses, those that finish close together in one list, until every request is answered. `version`:
        of the weights the engine has now."""
        with self._lock:
            self._engine, self._inbox = engine, [(number, requests)]
            self._missing.clear()
            self._kept = []
            self._aborted = {name: last for name, last in self._aborted.items() if last >= number}
            self._work_ended.wait_for(lambda: not self._working_elsewhere)
        sent, finished = 0.0, list[Response]()
        try:
            while True:
                self._do_work()
                finished += self._start_waiting(engine, version())
                finished += self._poll(engine)
                if self._end_if_done():
                    break
                if finished and time.monotonic() - sent > FLUSH_S:
                    yield finished
                    finished, sent = [], time.monotonic()
            if finished:
                yield finished
        except GeneratorExit:
            self._abort_rest(engine)
            raise
        finally:
            with self._lock:
                self._engine, self._inbox = None, []
                work, self._work = self._work, []
            for answer, _ in work:
                answer.cancel()

    def _do_work(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    return
                answer, work = self._work.pop(0)
            try:
                answer.set_result(work())
            except BaseException as error:  # re-raised in the calling thread
                answer.set_exception(error)

    def _start_waiting(self, engine: RolloutEngine, version: int) -> list[Response]:
        """Submit what came in; answers what was aborted before it started."""
        with self._lock:
            inbox, self._inbox = self._inbox, []
            unwanted = [
                r for number, rs in inbox for r in rs if self._aborted.get(r.request_id, -1) >= number
            ]
            ids = {request.request_id for request in unwanted}
            wanted = [r for _, requests in inbox for r in requests if r.request_id not in ids]
            self._missing.update({request.request_id: request.n for request in wanted})
            if wanted:
                engine.submit(wanted)
        return [response for request in unwanted for response in aborted(request, version)]

    def _poll(self, engine: RolloutEngine) -> list[Response]:
        kept, self._kept = self._kept, []
        responses = kept + engine.poll(0.0 if kept else POLL_S)
        with self._lock:
            for response in responses:
                self._missing[response.request_id] -= 1
                if self._missing[response.request_id] <= 0:
                    del self._missing[response.request_id]
        return responses

    def _end_if_done(self) -> bool:
        """Decided under the lock: a later `submit` is refused, and the driver opens another stream."""
        with self._lock:
            if self._missing or self._inbox or self._work:
                return False
            self._engine = None
            return True

    def _abort_rest(self, engine: RolloutEngine) -> None:
        """Closed early: end what the engine still runs."""
        with self._lock:
            left = list(self._missing)
        with suppress(NotImplementedError):
            engine.abort(left)
        while engine.poll():
            pass


class RolloutServer(RPCServer):
    """A process that generates: the calls `RayRollout` makes."""

    def __init__(self, rank: int, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self._stream = GenerationStream()

    def rollout_engine(self) -> RolloutEngine:
        """The engine of this process."""
        raise NotImplementedError

    def weights_version(self) -> int:
        """Of the weights the engine has."""
        return 0

    def do_open_generation(self) -> None:
        """Before the first request of a generation."""

    def do_close_generation(self) -> None:
        """After its last response."""

    def do_generate(self, number: int, requests: list[Request]) -> Iterator[list[Response]]:
        return self._stream.run(self.rollout_engine(), number, requests, self.weights_version)

    def serve_between_polls(self, call: str, *args: Any) -> Outcome:
        """`serve` that does not wait for the end of a stream: the stream's thread does it between two polls."""
        return self._stream.between_polls(lambda: self.serve(call, *args))

    def control_submit(self, number: int, requests: list[Request]) -> bool:
        return self._stream.submit(number, requests)

    def control_abort(self, number: int, request_ids: list[str]) -> bool:
        return self._stream.abort(number, request_ids)

    def control_stats(self) -> RolloutStats:
        return self.rollout_engine().stats()

    def control_release(self, prefix_ids: list[str]) -> None:
        self.rollout_engine().release(prefix_ids)
