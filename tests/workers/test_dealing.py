"""Requests that change hands: whatever the engines' pace and whoever calls off, every sample comes once, whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RolloutError
from verl.rollout.base import Request, Response, SamplingParams
from verl.workers.request_scheduler import Part, RequestScheduler

PLACES = 4


def length_of(name: str, sample: int) -> int:
    return random.Random(f"{name}/{sample}").randint(1, 9)


def token(name: str, sample: int, place: int) -> int:
    """Keyed like the draws of an engine: whoever goes on, it is the same one."""
    return random.Random(f"{name}/{sample}/{place}").randint(0, 10**6)


def whole(name: str, sample: int) -> list[int]:
    return [token(name, sample, place) for place in range(length_of(name, sample))]


class Engine:
    """Begins samples in order, as many at once as it has places; `eager` ones begin others first."""

    def __init__(self, part: Part, eager: bool) -> None:
        self.off: set[str] = set()
        self.everything_off = False
        queue = [(request, sample) for request in part.requests.values() for sample in range(request.n)]
        self.queue = queue[::-1] if eager else queue
        self.running: list[tuple[Request, int, list[int]]] = []

    @property
    def idle(self) -> bool:
        return not self.queue and not self.running

    def _unwanted(self, request: Request) -> bool:
        return self.everything_off or request.request_id in self.off

    def hear(self) -> list[Response]:
        """What was called off, with what there is of it."""
        out = [self._answer(*one, "abort") for one in self.running if self._unwanted(one[0])]
        out += [self._answer(*one, [], "abort") for one in self.queue if self._unwanted(one[0])]
        self.running = [one for one in self.running if not self._unwanted(one[0])]
        self.queue = [one for one in self.queue if not self._unwanted(one[0])]
        return out

    def step(self) -> list[Response]:
        out = self.hear()
        while self.queue and len(self.running) < PLACES:
            self.running.append((*self.queue.pop(0), []))
        for request, sample, new in list(self.running):
            before = request.partial[sample] if request.partial else ()
            new.append(token(request.request_id, sample, len(before) + len(new)))
            if len(before) + len(new) == length_of(request.request_id, sample):
                self.running.remove((request, sample, new))
                out.append(self._answer(request, sample, new, "stop"))
        return out

    @staticmethod
    def _answer(request: Request, sample: int, new: list[int], reason: str) -> Response:
        return Response(request.request_id, sample, list(new), [float(t) for t in new], reason, 3)  # type: ignore[arg-type]


class Run:
    """As `SpreadRollout` does it, with engines that are stepped by hand."""

    def __init__(self, requests: list[Request], ranks: int, eager: bool) -> None:
        self.deal, self.ranks, self.eager = RequestScheduler(requests, ranks, PLACES, 3), ranks, eager
        self.engines: dict[int, Engine] = {}
        self.found: list[Response] = []
        self.by_rank = [0] * ranks
        self.moves = 0
        self.employ()

    def employ(self) -> None:
        for rank in range(self.ranks):
            if rank not in self.engines:
                part = self.deal.next_part(rank)
                if part is not None:
                    self.engines[rank] = Engine(part, self.eager)
        idle = self.ranks - len(self.engines)
        while self.engines and (taken := self.deal.steal(idle)) is not None:
            self.engines[taken[0]].off.update(taken[1])
            self.moves += 1
        self.found += self.deal.unwanted()

    def step(self, rank: int) -> None:
        if rank in self.engines:
            responses = self.deal.answered(rank, self.engines[rank].step())
            self.found += responses
            self.by_rank[rank] += len(responses)
            if self.engines[rank].idle:
                del self.engines[rank]
                self.deal.done(rank)
        self.employ()

    def cancel(self, names: set[str] | None) -> None:
        self.deal.cancel(names)
        for engine in self.engines.values():
            engine.everything_off |= names is None
            engine.off.update(names or ())

    def finish(self) -> dict[tuple[str, int], Response]:
        for _ in range(10_000):
            if not self.engines:
                break
            for rank in list(self.engines):
                self.step(rank)
        assert not self.engines
        keys = [(response.request_id, response.sample) for response in self.found]
        assert len(set(keys)) == len(keys), "answered twice"
        return dict(zip(keys, self.found, strict=True))


def some(count: int, n: int = 2) -> list[Request]:
    lengths = [random.Random(i).randint(1, 5) for i in range(count)]
    return [Request(f"r{i}", [1] * lengths[i], SamplingParams(max_tokens=20), n=n) for i in range(count)]


@settings(max_examples=150)
@given(
    count=st.integers(0, 30),
    ranks=st.integers(1, 4),
    n=st.integers(1, 3),
    eager=st.booleans(),
    paces=st.lists(st.integers(0, 3), max_size=200),
    off=st.none() | st.tuples(st.integers(0, 60), st.none() | st.sets(st.integers(0, 29))),
)
def test_every_sample_comes_once_and_whole(count, ranks, n, eager, paces, off) -> None:
    """`eager` engines have begun what a guess takes back: what they made is gone on with."""
    requests = some(count, n)
    run = Run(requests, ranks, eager)
    at, named = off or (-1, None)
    names = None if named is None else {f"r{i}" for i in named}
    for step, rank in enumerate(paces):
        if step == at:
            run.cancel(names)
        run.step(rank)
    found = run.finish()
    assert set(found) == {(request.request_id, sample) for request in requests for sample in range(n)}
    for (name, sample), response in found.items():
        tokens = whole(name, sample)
        if response.finish_reason == "stop":
            assert response.token_ids == tokens
            assert response.log_probs == [float(t) for t in tokens]
        else:
            assert off is not None and (names is None or name in names), "only what was called off is cut"
            assert response.token_ids == tokens[: len(response.token_ids)]


def test_one_that_is_through_takes_what_another_has_not_begun() -> None:
    """The second stands still after it began: the first ends up with all but what that one runs."""
    run = Run(some(20), 2, eager=False)
    run.step(1)
    for _ in range(500):
        run.step(0)
        run.found += run.deal.answered(1, run.engines[1].hear())
        run.employ()
    assert run.moves >= 2
    assert run.by_rank[0] == 40 - PLACES
    run.finish()


def test_shares_are_even_and_all_of_it_is_dealt_out_at_once() -> None:
    deal = RequestScheduler(some(11), 3, at_once=2, version=0)
    sizes = []
    for rank in range(3):
        part = deal.next_part(rank)
        assert part is not None
        lengths = [len(request.prompt_ids) for request in part.requests.values()]
        assert lengths == sorted(lengths), "as engines begin them"
        sizes.append(len(part.requests))
    assert sizes == [4, 4, 3]
    assert deal.next_part(3) is None


def test_a_request_given_twice_is_refused() -> None:
    with pytest.raises(RolloutError, match="request 'r1' was given twice"):
        RequestScheduler([*some(3), some(2)[1]], 2, PLACES, 0)


def test_a_request_that_was_resumed_keeps_its_first_tokens_when_it_changes_hands() -> None:
    """Tokens given with the request are not among those answered, wherever it is gone on with."""
    before = {f"r{i}": [whole(f"r{i}", s)[:-1] for s in range(2)] for i in range(12)}
    requests = [replace(r, partial=tuple(before[r.request_id])) for r in some(12)]
    run = Run(requests, 2, eager=True)
    for _ in range(40):
        run.step(0)
    assert run.moves
    for (name, sample), response in run.finish().items():
        assert before[name][sample] + response.token_ids == whole(name, sample)
