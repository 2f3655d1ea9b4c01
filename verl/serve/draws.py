"""One thread that drives the engine and coroutines that wait for samples: all requests in flight are one batch."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from verl.errors import RolloutError
from verl.rollout.base import Request, Response, RolloutEngine, SamplingParams
from verl.rollout.sampler import Sampler

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_KEY = "serve"
"""Keys the draws of every request: they depend on its prompt, seed and sampling alone."""


class Overloaded(Exception):
    """As many samples as may be are under way."""


@dataclass(frozen=True)
class SamplePart:
    """What a sample has so far, from its beginning; `ended`: this is all of it."""

    response: Response
    ended: bool


class StreamingSampler(Sampler):
    """Also tells what unfinished samples of streamed requests have."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self._readers: dict[str, Callable[[Response], None]] = {}

    def stream(self, request: Request, report: Callable[[Response], None]) -> None:
        """Report the samples of a request that is about to be submitted, after every poll."""
        with self.changed:
            self._readers[request.request_id] = report

    def unread(self, request_id: str) -> None:
        with self.changed:
            self._readers.pop(request_id, None)

    def deliver(self, responses: Iterable[Response]) -> None:
        super().deliver(responses)
        with self.changed:
            readers = dict(self._readers)
        for response in self.engine.progress(readers) if readers else ():
            readers[response.request_id](response)


class EngineThread:
    """Samples from an engine, for coroutines of one event loop."""

    def __init__(self, engine: RolloutEngine, most_samples: int) -> None:
        self.engine = engine
        self.sampler = StreamingSampler(engine)
        self.most_samples = most_samples
        self.in_flight = 0
        """Samples that were asked for and have not ended."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.sampler.run(lambda: self._stopping, serve=True)
            except Exception as error:  # the requests under way have failed with it; the next ones may not
                logger.exception("generation failed: %s", error)

    def close(self) -> None:
        """End what is under way, and the thread."""
        self._stopping = True
        self.sampler.post(lambda: None)  # wakes it
        with suppress(NotImplementedError):
            self.engine.abort()
        self._thread.join()
        self.sampler.abort()

    async def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns, called between two steps of the engine."""
        return await asyncio.to_thread(self.sampler.call, function)

    async def draw(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        n: int,
        seed: int,
        *,
        streamed: bool = False,
    ) -> AsyncIterator[SamplePart]:
        """`n` samples as they end and, with `streamed` and an engine that can tell, what they have before. Closing the
        iterator ends those that are under way. RolloutError: the request cannot be served, or the engine failed."""
        if self.in_flight + n > self.most_samples:
            raise Overloaded(" (--max-samples)")
        self.in_flight += n
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[SamplePart | BaseException] = asyncio.Queue()

        def put(part: SamplePart | BaseException) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, part)

        name = f"{_KEY}-{uuid.uuid4().hex}"
        request = Request(name, prompt_ids, sampling, n, seed, key=_KEY, streamed=streamed)
        left = n
        try:
            if streamed:
                self.sampler.stream(request, lambda response: put(SamplePart(response, False)))
            self.sampler.submit([request], lambda response: put(SamplePart(response, True)), fail=put)
            while left:
                part = await arrived.get()
                if isinstance(part, BaseException):
                    raise RolloutError(str(part)) from part
                left -= part.ended
                yield part
        finally:
            self.in_flight -= n
            self.sampler.unread(name)
            if left:
                self.sampler.post(lambda: self._abandon(name))

    def _abandon(self, request_id: str) -> None:
        with suppress(NotImplementedError):  # then it runs to its end
            self.sampler.cancel([request_id])
