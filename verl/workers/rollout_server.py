"""One process's side of generation: a `Sampler` over its engine, for the driver, which may send more meanwhile.

Requests and aborts arrive from a control thread; the thread of the stream generates, and takes new weights between two
polls. After a stream ends its engine generates nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from verl.rollout.base import Request, Response, RolloutEngine, RolloutStats
from verl.rollout.sampler import Sampler
from verl.workers.rpc_server import Outcome, RPCServer

FLUSH_S = 0.02
"""Responses that finish this soon after others were sent are sent together: sending costs a quarter of a millisecond
in which nothing is generated."""


class RolloutServer(RPCServer):
    """A process that generates: the calls `RayRollout` makes."""

    def __init__(self, rank: int, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._received = 0
        """Calls of `control_submit`."""
        self._finished: list[Response] = []

    def rollout_engine(self) -> RolloutEngine:
        """The engine of this process."""
        raise NotImplementedError

    @property
    def sampler(self) -> Sampler:
        """Suspended while no stream runs."""
        with self._lock:
            if self._sampler is None:
                self._sampler = Sampler(self.rollout_engine())
                self._sampler.suspended = True
            return self._sampler

    def do_open_generation(self) -> None:
        """Before the first request of a generation."""

    def do_close_generation(self) -> None:
        """After its last response."""

    def do_generate(self, submissions: int) -> Iterator[list[Response]]:
        """Yield responses, those that finish close together in one list, until the first `submissions` calls of
        `control_submit`, and those that come meanwhile, are answered."""
        sampler, sent, ended = self.sampler, 0.0, False

        def ends_or_sends() -> bool:
            nonlocal ended
            ended = self._received >= submissions and sampler.suspend_if_idle()
            return ended or (bool(self._finished) and time.monotonic() - sent > FLUSH_S)

        with sampler.driving():
            try:
                sampler.resume()
                while not ended:
                    sampler.run(ends_or_sends, serve=True)
                    if self._finished:
                        yield self._take_finished()
                        sent = time.monotonic()
            except BaseException as error:
                sampler.abort(error)
                self._finished = []
                raise
            finally:
                sampler.suspended = True

    def _take_finished(self) -> list[Response]:
        finished, self._finished = self._finished, []
        return finished

    def serve_between_polls(self, call: str, *args: Any) -> Outcome:
        """`serve` that does not wait for the end of a stream: the stream's thread does it between two polls."""
        return self.sampler.call(lambda: self.serve(call, *args))

    def control_submit(self, requests: list[Request]) -> None:
        with self.sampler.changed:
            try:
                self.sampler.submit(requests, lambda response: self._finished.append(response))
            except Exception as error:  # reported by the stream
                self.sampler.post(partial(_fail, error))
            self._received += 1

    def control_abort(self, request_ids: list[str] | None) -> bool:
        """Abort requests (None: all). False: the engine cannot abort what it has started."""
        try:
            self.sampler.cancel(request_ids)
        except NotImplementedError:
            return False
        return True

    def control_stats(self) -> RolloutStats:
        return self.rollout_engine().stats()

    def control_release(self, prefix_ids: list[str]) -> None:
        self.rollout_engine().release(prefix_ids)


def _fail(error: Exception) -> NoReturn:
    raise error
