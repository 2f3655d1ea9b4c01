"""One process's side of generation: every sample is answered once, whenever requests and aborts arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from verl.rollout.base import BatchEngine, Request, Response, SamplingParams
from verl.rollout.native import NativeRollout
from verl.workers.generation_stream import GenerationStream

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def version() -> int:
    return 3


class Stepping(BatchEngine):
    """One token a step for every sample; `before_step` is called with the number of the step before it is made."""

    def __init__(self, before_step: Callable[[int], None] = lambda step: None) -> None:
        self.before_step = before_step
        self.steps = 0
        self._off: set[str] | None = set()

    def run_batch(self, requests: Iterable[Request]) -> Iterator[Response]:
        self._off = set()
        return self._run(list(requests))

    def _run(self, requests: list[Request]) -> Iterator[Response]:
        running = {(request, sample): [] for request in requests for sample in range(request.n)}
        while running:
            self.steps += 1
            self.before_step(self.steps)
            off, self._off = self._off, set()
            for (request, sample), tokens in list(running.items()):
                if off is None or request.request_id in off:
                    reason: Any = "abort"
                else:
                    tokens.append(len(tokens))
                    reason = "length" if len(tokens) == request.sampling.max_tokens else None
                if reason is not None:
                    del running[request, sample]
                    yield Response(request.request_id, sample, tokens, [0.0] * len(tokens), reason, 3)

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        if request_ids is None:
            self._off = None
        elif self._off is not None:
            self._off.update(request_ids)

    def update_weights(self, source: Any, version: int) -> None:
        raise AssertionError


def request(name: str, tokens: int, n: int = 1) -> Request:
    return Request(name, (1, 2), SamplingParams(max_tokens=tokens), n=n)


def answers(flushes: Iterable[list[Response]]) -> dict[tuple[str, int], tuple[int, str]]:
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for response in (response for flush in flushes for response in flush):
        assert (response.request_id, response.sample) not in found, "answered twice"
        assert response.policy_version == 3
        found[response.request_id, response.sample] = (len(response.token_ids), response.finish_reason)
    return found


def test_an_abort_that_comes_before_its_request_is_heeded() -> None:
    stream, engine = GenerationStream(), Stepping()
    stream.abort(5, ["b"])
    found = answers(stream.run(engine, 5, [request("a", 4, n=2), request("b", 4, n=2)], version))
    assert found == {
        ("a", 0): (4, "length"),
        ("a", 1): (4, "length"),
        ("b", 0): (0, "abort"),
        ("b", 1): (0, "abort"),
    }
    steps = engine.steps
    stream.abort(6, ["c"])
    assert answers(stream.run(engine, 6, [request("c", 4)], version)) == {("c", 0): (0, "abort")}
    assert engine.steps == steps, "nothing is computed for it"


def test_an_abort_of_an_earlier_dispatch_is_not_heeded() -> None:
    """The same request id may be submitted again, after it was answered."""
    stream = GenerationStream()
    answers(stream.run(Stepping(), 5, [request("a", 1)], version))
    stream.abort(5, ["a"])
    assert answers(stream.run(Stepping(), 6, [request("a", 4)], version)) == {("a", 0): (4, "length")}


def test_requests_and_aborts_are_taken_while_it_runs() -> None:
    stream, accepted = GenerationStream(), []

    def before(step: int) -> None:
        if step == 3:
            calls = [(stream.abort, (7, ["b", "unknown"])), (stream.submit, (8, [request("c", 2, n=2)]))]
            for call, args in calls:
                other = threading.Thread(target=lambda call=call, args=args: accepted.append(call(*args)))
                other.start()
                other.join()

    found = answers(stream.run(Stepping(before), 7, [request("a", 9), request("b", 9)], version))
    assert found == {
        ("a", 0): (9, "length"),
        ("b", 0): (2, "abort"),
        ("c", 0): (2, "length"),
        ("c", 1): (2, "length"),
    }
    assert accepted == [True, True]
    assert not stream.submit(9, [request("d", 1)]), "no stream runs: the caller opens another"


def test_an_engine_that_cannot_abort_says_so() -> None:
    stream, said = GenerationStream(), []

    class Deaf(Stepping):
        def abort(self, request_ids: Iterable[str] | None = None) -> None:
            BatchEngine.abort(self, request_ids)

    engine = Deaf(lambda step: said.append(stream.abort(0, ["a"])))
    assert answers(stream.run(engine, 0, [request("a", 2)], version)) == {("a", 0): (2, "length")}
    assert said == [False, False]


def test_closing_early_leaves_an_idle_engine(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    engine, stream = NativeRollout(model, None), GenerationStream()
    requests = [
        Request("short", (5, 6), SamplingParams(max_tokens=1, ignore_eos=True)),
        Request("long", (5, 6), LONG),
    ]
    with pytest.raises(KeyError), closing(engine.generate(requests)) as responses:
        next(responses)
        raise KeyError
    lists = stream.run(engine, 0, requests, lambda: 0)
    next(lists)
    lists.close()
    assert len(list(engine.generate(requests))) == 2, "it generates again"


def test_a_failing_engine_ends_the_stream() -> None:
    stream = GenerationStream()

    def fail(step: int) -> None:
        raise KeyError(step)

    with pytest.raises(KeyError):
        answers(stream.run(Stepping(fail), 0, [request("a", 2)], version))
    assert not stream.submit(1, [request("b", 1)])
    assert answers(stream.run(Stepping(), 1, [request("a", 2)], version)) == {("a", 0): (2, "length")}


def test_word_that_comes_while_another_is_answered_reaches_the_device_too(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is taken from the scheduler and not from the device would go on writing where others write now."""
    from transformers import AutoModelForCausalLM

    from verl.rollout.native.device_runner import DeviceRunner

    engine = NativeRollout(AutoModelForCausalLM.from_pretrained(tiny_model_dir), None, on_device=True)
    requests = [Request(name, (5, 6, 7), LONG, seed=2) for name in ("first", "second", "third")]
    requests.append(Request("early", (5, 6, 7), SamplingParams(max_tokens=1, ignore_eos=True)))
    whole = {response.request_id: response.token_ids for response in engine.generate(requests)}
    evict, taken = DeviceRunner.evict, []

    def naming_more(runner: DeviceRunner, sequences: list[Any]) -> list[Any]:
        ended = evict(runner, sequences)
        if sequences and not taken:
            engine.abort(["second"])
        taken.extend(sequence.request.request_id for sequence in sequences)
        return ended

    monkeypatch.setattr(DeviceRunner, "evict", naming_more)
    found = {}
    for response in engine.generate(requests):
        assert response.request_id not in found
        found[response.request_id] = response
        if response.request_id == "early":
            engine.abort(["first"])
    assert taken == ["first", "second"]
    assert [found[name].finish_reason for name in ("first", "second", "third")] == [
        "abort",
        "abort",
        "length",
    ]
    for name, response in found.items():
        assert response.token_ids == whole[name][: len(response.token_ids)]
    assert found["third"].token_ids == whole["third"]
