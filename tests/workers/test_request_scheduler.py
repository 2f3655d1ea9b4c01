"""Requests over engines: whatever the engines' pace and whoever cancels, every sample comes exactly once."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout.base import Request, Response, SamplingParams
from verl.workers.rollout_rank import RequestScheduler

MAX_NUM_SEQS = 4


def length_of(name: str, sample: int) -> int:
    return random.Random(f"{name}/{sample}").randint(1, 9)


class Engine:
    """Starts samples in order, as many at once as it has slots; one token a step for each."""

    def __init__(self) -> None:
        self.queue: list[tuple[Request, int]] = []
        self.running: list[tuple[Request, int, list[int]]] = []

    def submit(self, requests: list[Request]) -> None:
        self.queue += [(request, sample) for request in requests for sample in range(request.n)]

    def abort(self, names: list[str]) -> list[Response]:
        out = [self.response(*one, "abort") for one in self.running if one[0].request_id in names]
        out += [self.response(*one, [], "abort") for one in self.queue if one[0].request_id in names]
        self.running = [one for one in self.running if one[0].request_id not in names]
        self.queue = [one for one in self.queue if one[0].request_id not in names]
        return out

    def step(self) -> list[Response]:
        while self.queue and len(self.running) < MAX_NUM_SEQS:
            self.running.append((*self.queue.pop(0), []))
        out = []
        for request, sample, tokens in list(self.running):
            tokens.append(len(tokens))
            if len(tokens) == length_of(request.request_id, sample):
                self.running.remove((request, sample, tokens))
                out.append(self.response(request, sample, tokens, "stop"))
        return out

    @staticmethod
    def response(request: Request, sample: int, tokens: list[int], reason: str) -> Response:
        return Response(request.request_id, sample, list(tokens), [0.0] * len(tokens), reason, 3)  # type: ignore[arg-type]


class Run:
    """As `RayRollout` does it, with engines that are stepped by hand."""

    def __init__(self, ranks: int) -> None:
        self.scheduler = RequestScheduler(range(ranks), MAX_NUM_SEQS)
        self.engines = [Engine() for _ in range(ranks)]
        self.found: list[Response] = []
        self.by_rank = [0] * ranks

    def dispatch(self) -> None:
        for rank, requests in self.scheduler.dispatch().items():
            self.engines[rank].submit(requests)

    def take(self, rank: int, responses: list[Response]) -> None:
        self.scheduler.answered(rank, len(responses))
        self.found += responses
        self.by_rank[rank] += len(responses)

    def step(self, rank: int) -> None:
        self.dispatch()
        self.take(rank, self.engines[rank].step())

    def cancel(self, names: set[str] | None) -> None:
        dropped = self.scheduler.cancel(names)
        self.found += [Engine.response(r, sample, [], "abort") for r in dropped for sample in range(r.n)]
        for rank, engine in enumerate(self.engines):
            running = {one[0].request_id for one in (*engine.queue, *engine.running)}
            self.take(rank, engine.abort(list(running if names is None else running & names)))

    def finish(self) -> dict[tuple[str, int], Response]:
        for _ in range(10_000):
            if self.scheduler.idle:
                break
            for rank in range(len(self.engines)):
                self.step(rank)
        assert not self.scheduler.waiting
        keys = [(response.request_id, response.sample) for response in self.found]
        assert len(set(keys)) == len(keys), "answered twice"
        return dict(zip(keys, self.found, strict=True))


def some(count: int, n: int = 2, first: int = 0) -> list[Request]:
    return [Request(f"r{i}", [1], SamplingParams(max_tokens=20), n=n) for i in range(first, first + count)]


@settings(max_examples=150)
@given(
    counts=st.tuples(st.integers(0, 20), st.integers(0, 10)),
    ranks=st.integers(1, 4),
    n=st.integers(1, 6),
    paces=st.lists(st.integers(0, 3), max_size=200),
    late=st.integers(0, 60),
    cancelled=st.none() | st.tuples(st.integers(0, 60), st.none() | st.sets(st.integers(0, 29))),
)
def test_every_sample_comes_once_and_complete(counts, ranks, n, paces, late, cancelled) -> None:
    """Some are submitted while others run."""
    requests, more = some(counts[0], n), some(counts[1], n, counts[0])
    run = Run(ranks)
    run.scheduler.submit(requests)
    run.dispatch()
    at, numbers = cancelled or (-1, None)
    names = None if numbers is None else {f"r{i}" for i in numbers}
    submitted = False
    for step, rank in enumerate(paces):
        if step == late:
            run.scheduler.submit(more)
            submitted = True
        if step == at:
            run.cancel(names)
        run.step(rank % ranks)
    if not submitted:
        run.scheduler.submit(more)
    found = run.finish()
    assert set(found) == {(r.request_id, sample) for r in (*requests, *more) for sample in range(n)}
    for (name, sample), response in found.items():
        if response.finish_reason == "stop":
            assert len(response.token_ids) == length_of(name, sample)
        else:
            assert cancelled is not None and (names is None or name in names), (
                "only what was cancelled is cut"
            )


def test_whichever_engine_is_free_takes_what_waits() -> None:
    """The second stands still: the first generates all but what the second was sent."""
    run = Run(2)
    run.scheduler.submit(some(20))
    for _ in range(500):
        run.step(0)
    sent = MAX_NUM_SEQS  # and one chunk more, which a request of two samples does not fit
    assert run.by_rank == [40 - sent, 0]
    run.finish()


def test_requests_go_to_the_least_loaded_engine() -> None:
    scheduler = RequestScheduler(range(3), 1024)
    scheduler.submit(some(11))
    sizes = {rank: len(requests) for rank, requests in scheduler.dispatch().items()}
    assert sizes == {0: 4, 1: 4, 2: 3} and scheduler.dispatch() == {}


def test_a_conversation_stays_with_its_kv_blocks_until_it_is_released() -> None:
    run = Run(2)
    sampling = SamplingParams(max_tokens=20)
    run.scheduler.submit([Request(f"turn{i}", [1], sampling, prefix_id=f"c{i}") for i in range(2)])
    run.finish()
    run.scheduler.submit([Request("next", [1, 2], sampling, prefix_id="c1")])
    assert list(run.scheduler.dispatch()) == [1]
    assert run.scheduler.release(["c1", "unknown"]) == {1: ["c1"]}
    run.scheduler.submit([Request("after", [1, 2], sampling, prefix_id="c1")])
    assert list(run.scheduler.dispatch()) == [0]
