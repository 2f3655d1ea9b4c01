"""Generation over many processes as one rollout engine: a queue of prompts that ranks take from as they get free.

What always holds: a prompt that no engine has room for waits in the queue until a rank is free for it, so a rank
that finishes early takes what others have not started; the tokens do not depend on which rank drew them, because
every draw is keyed by request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from verl.rollout.base import Request, Response, RolloutEngine
from verl.workers.ray_calls import RankCalls
from verl.workers.shares import pieces


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
        self.taken: list[int] = []
        """Of the last `generate`: requests each host took."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]:
        requests = list(requests)
        if self._shared:
            self._calls.all("open_generation")
        yield from self._run(requests)
        if self._shared:
            self._calls.all("close_generation")

    def _run(self, requests: list[Request]) -> Iterator[Response]:
        self.taken = [0] * len(self._hosts)
        capacity = max(1, self._max_num_seqs // max((request.n for request in requests), default=1))
        cut = pieces(len(requests), len(self._hosts), capacity)
        waiting = (requests[piece.start : piece.stop] for piece in cut)
        running: dict[Any, int] = {}
        for rank in self._hosts:
            self._give(rank, waiting, running)
        while running:
            for stream in self._calls.ready("generate", running):
                rank = running[stream]
                try:
                    outcome = ray.get(next(stream))
                except StopIteration:
                    del running[stream]
                    self._give(rank, waiting, running)
                    continue
                except RayError as error:
                    self._calls.fail("generate", rank, error, running)
                yield from self._calls.value_of("generate", rank, outcome, running)

    def _give(self, rank: int, waiting: Iterator[list[Request]], running: dict[Any, int]) -> None:
        piece = next(waiting, None)
        if piece is not None:
            actor = self._calls.actors[rank]
            stream = actor.stream.options(num_returns="streaming").remote("generate", piece)
            running[stream] = rank
            self.taken[self._hosts.index(rank)] += len(piece)

    def update_weights(self, source: Any, version: int) -> None:
        """The ranks' engines take the weights of the ranks' actor."""
        self._publish(version)
