"""One process's side of generation: every sample is answered once, whenever requests and aborts arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.workers.local_server import Server
from verl.errors import RolloutError
from verl.rollout.base import BatchEngine, Request, Response, SamplingParams
from verl.rollout.native import NativeRollout

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


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
        found[response.request_id, response.sample] = (len(response.token_ids), response.finish_reason)
    return found


def test_what_is_aborted_before_the_stream_begins_is_not_computed() -> None:
    server = Server(engine := Stepping())
    server.control_submit([request("a", 4, n=2), request("b", 4, n=2)])
    assert server.control_abort(["b", "unknown"])
    assert answers(server.do_generate(1)) == {
        ("a", 0): (4, "length"),
        ("a", 1): (4, "length"),
        ("b", 0): (0, "abort"),
        ("b", 1): (0, "abort"),
    }
    steps = engine.steps
    server.control_submit([request("a", 4)])
    assert server.control_abort(None)
    assert answers(server.do_generate(2)) == {("a", 0): (0, "abort")}
    assert engine.steps == steps, "nothing is computed for it"
    assert server.control_abort(["a"])
    assert answers(server.generate([request("a", 4)])) == {("a", 0): (4, "length")}, "not what was answered"


def test_a_stream_waits_for_requests_that_are_on_their_way() -> None:
    server = Server(Stepping())
    late = threading.Timer(0.05, server.control_submit, ([request("a", 2)],))
    late.start()
    assert answers(server.do_generate(1)) == {("a", 0): (2, "length")}
    late.join()


def test_requests_and_aborts_are_taken_while_it_runs() -> None:
    accepted = []

    def before(step: int) -> None:
        if step == 3:
            calls = [
                (server.control_abort, (["b", "unknown"],)),
                (server.control_submit, ([request("c", 2, n=2)],)),
            ]
            for call, args in calls:
                other = threading.Thread(target=lambda call=call, args=args: accepted.append(call(*args)))
                other.start()
                other.join()

    server = Server(Stepping(before))
    assert answers(server.generate([request("a", 9), request("b", 9)])) == {
        ("a", 0): (9, "length"),
        ("b", 0): (2, "abort"),
        ("c", 0): (2, "length"),
        ("c", 1): (2, "length"),
    }
    assert accepted == [True, None]
    server.control_submit([request("d", 1)])
    assert server.engine.stats().waiting == 0, "no stream runs: the next one takes it"
    assert answers(server.do_generate(3)) == {("d", 0): (1, "length")}


def test_an_engine_that_cannot_abort_says_so() -> None:
    said = []

    class Deaf(Stepping):
        def abort(self, request_ids: Iterable[str] | None = None) -> None:
            BatchEngine.abort(self, request_ids)

    server = Server(Deaf(lambda step: said.append(server.control_abort(["a"]))))
    assert answers(server.generate([request("a", 2)])) == {("a", 0): (2, "length")}
    assert said == [False, False]


def test_a_request_that_cannot_be_served_is_an_error_of_the_stream(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    server = Server(NativeRollout(AutoModelForCausalLM.from_pretrained(tiny_model_dir), None))
    for running in (False, True):
        lists = server.generate([Request("a", (5, 6), LONG)]) if running else iter(())
        server.control_submit([Request("b", (5, 6), SamplingParams(temperature=-1))])
        with pytest.raises(RolloutError, match="temperature is -1"):
            answers(lists if running else server.do_generate(server._received))
    assert set(answers(server.generate([Request("a", (5, 6), LONG)]))) == {("a", 0)}, "and it goes on"


def test_closing_early_leaves_an_idle_engine(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    server = Server(engine := NativeRollout(model, None))
    requests = [
        Request("short", (5, 6), SamplingParams(max_tokens=1, ignore_eos=True)),
        Request("long", (5, 6), LONG),
    ]
    with pytest.raises(KeyError), closing(engine.generate(requests)) as responses:
        next(responses)
        raise KeyError
    lists = server.generate(requests)
    next(lists)
    lists.close()
    assert len(list(engine.generate(requests))) == 2, "it generates again"


def test_a_failing_engine_ends_the_stream() -> None:
    def fail(step: int) -> None:
        if step == 1:
            raise KeyError(step)

    server = Server(Stepping(fail))
    with pytest.raises(KeyError):
        answers(server.generate([request("a", 2)]))
    assert answers(server.generate([request("a", 2)])) == {("a", 0): (2, "length")}


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
