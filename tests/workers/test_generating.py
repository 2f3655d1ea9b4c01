"""Calling generation off on one process: whenever the word comes, every sample is answered once and nothing goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.rollout.base import BatchEngine, Request, Response, SamplingParams
from verl.rollout.native import NativeRollout
from verl.workers.generating import Generating, in_flushes
from verl.workers.rollout import _left_in_order

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
        assert response.policy_version == 3
        found[response.request_id, response.sample] = (len(response.token_ids), response.finish_reason)
    return found


def test_word_that_comes_before_the_piece_is_heeded() -> None:
    generating, engine = Generating(), Stepping()
    generating.abort(5, ["b"])
    found = answers(generating.run(engine, [request("a", 4, n=2), request("b", 4, n=2)], 5, 3))
    assert found == {
        ("a", 0): (4, "length"),
        ("a", 1): (4, "length"),
        ("b", 0): (0, "abort"),
        ("b", 1): (0, "abort"),
    }
    steps = engine.steps
    generating.abort(5, None)
    assert answers(generating.run(engine, [request("c", 4)], 5, 3)) == {("c", 0): (0, "abort")}
    assert engine.steps == steps, "nothing is computed for what nobody wants"


@pytest.mark.parametrize("numbers", [(4, 5), (5, 6)])
def test_word_about_another_call_is_not_heeded(numbers: tuple[int, int]) -> None:
    """About one that is over; and what was said of one call does not last for the next."""
    said, now = numbers
    generating = Generating()
    answers(generating.run(Stepping(), [request("a", 1)], 5, 3))
    generating.abort(said, None)
    assert answers(generating.run(Stepping(), [request("a", 4)], now, 3)) == {("a", 0): (4, "length")}


def test_word_that_comes_while_it_runs_ends_what_it_names() -> None:
    generating = Generating()

    def before(step: int) -> None:
        if step == 3:
            other = threading.Thread(target=generating.abort, args=(0, ["b", "unknown"]))
            other.start()
            other.join()

    found = answers(generating.run(Stepping(before), [request("a", 9), request("b", 9)], 0, 3))
    assert found == {("a", 0): (9, "length"), ("b", 0): (2, "abort")}


def test_word_that_comes_while_the_engine_is_told_to_begin_is_heeded() -> None:
    """The engine forgets it there; it is told once more."""
    generating = Generating()

    class Late(Stepping):
        def run_batch(self, requests: Iterable[Request]) -> Iterator[Response]:
            generating.abort(0, ["b"])
            return super().run_batch(requests)

    found = answers(generating.run(Late(), [request("a", 2), request("b", 2)], 0, 3))
    assert found == {("a", 0): (2, "length"), ("b", 0): (0, "abort")}


def test_word_that_an_engine_misses_while_it_answers_another_is_said_again() -> None:
    generating = Generating()

    class Forgetful(Stepping):
        missed = False

        def abort(self, request_ids: Iterable[str] | None = None) -> None:
            if request_ids is not None and "c" in request_ids and not self.missed:
                self.missed = True
                return
            super().abort(request_ids)

    engine = Forgetful(lambda step: step == 2 and generating.abort(0, ["c"]) and None)
    found = answers(generating.run(engine, [request("a", 3), request("b", 9), request("c", 9)], 0, 3))
    assert engine.missed
    assert found == {("a", 0): (3, "length"), ("b", 0): (9, "length"), ("c", 0): (3, "abort")}


def test_an_engine_that_cannot_abort_says_so() -> None:
    generating, said = Generating(), []

    class Deaf(Stepping):
        def abort(self, request_ids: Iterable[str] | None = None) -> None:
            BatchEngine.abort(self, request_ids)

    engine = Deaf(lambda step: said.append(generating.abort(0, None)))
    assert answers(generating.run(engine, [request("a", 2)], 0, 3)) == {("a", 0): (2, "length")}
    assert said == [False, False]


def test_whoever_leaves_leaves_an_engine_that_is_free(tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    engine, generating = NativeRollout(model, None), Generating()
    requests = [
        Request("short", (5, 6), SamplingParams(max_tokens=1, ignore_eos=True)),
        Request("long", (5, 6), LONG),
    ]
    with pytest.raises(KeyError), _left_in_order(engine.generate(requests)) as responses:
        next(responses)
        raise KeyError
    pieces = generating.run(engine, requests, 0, 0)
    pieces.close()
    assert len(list(engine.generate(requests))) == 2, "it generates again"
    stream = generating._watched(engine, requests)
    next(stream)
    stream.close()
    assert len(list(engine.generate(requests))) == 2


def test_what_was_called_off_is_not_held_back_by_what_runs_on() -> None:
    """Whoever takes it over waits for it; the next response may be far off."""
    generating = Generating()

    def before(step: int) -> None:
        if step == 2:
            generating.abort(0, ["b", "c"])
        assert step < 3 or waiting == [], "everything called off was there before the engine went on"

    waiting = [("b", 0), ("b", 1), ("c", 0)]
    for flush in generating.run(
        Stepping(before), [request("a", 9), request("b", 9, n=2), request("c", 9)], 0, 3
    ):
        waiting = [key for key in waiting if key not in [(r.request_id, r.sample) for r in flush]]


def test_a_response_goes_at_once_and_those_right_after_it_together() -> None:
    """The first of a piece is not held back until the next, and the last ones not at all."""
    given = []

    def responses() -> Iterator[Response]:
        for sample in range(4):
            given.append(sample)
            yield Response("a", sample, [], [], "stop")

    flushes = in_flushes(responses())
    assert [response.sample for response in next(flushes)] == [0] == given
    assert [response.sample for flush in flushes for response in flush] == [1, 2, 3]


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
