"""A process that takes weights while it generates: in the stream's thread, between two polls, and every sample is still
answered once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.local_server import Server
from verl.config.sections.rollout import RolloutConfig
from verl.rollout.base import Request, Response, RolloutEngine, SamplingParams
from verl.rollout.native import NativeRollout
from verl.rollout.weight_sync import broadcast
from verl.rollout.weight_sync.broadcast import report
from verl.rollout.weight_sync.fingerprint import WeightManifest
from verl.rollout.weight_sync.probe import SAMPLES

WAIT_S = 240
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
INFO: Any = SimpleNamespace(vocab_size=20, dtype="float32")


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    """Other threads, as the lanes of a process are."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


class Watched(NativeRollout):
    """`before_poll` is called with the number of the poll."""

    def __init__(self, model: Any, before_poll: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(model, None)
        self.before_poll, self.polls = before_poll, 0

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """One step, however fast or slow."""
        self.polls += 1
        self.before_poll(self.polls)
        return super().poll(0)


class Changing(Server):
    """`do_change` is what is asked for while it generates."""

    def __init__(self, engine: RolloutEngine, change: Callable[[], Any]) -> None:
        super().__init__(engine)
        self.change = change

    def do_change(self) -> Any:
        return self.change()


def requests(*names: str, n: int = 1, sampling: SamplingParams = LONG) -> list[Request]:
    return [Request(name, (5, 6, 7), sampling, n=n, seed=3) for name in names]


def collect(flushes: Any) -> dict[tuple[str, int], Response]:
    found: dict[tuple[str, int], Response] = {}
    for response in (response for flush in flushes for response in flush):
        assert (response.request_id, response.sample) not in found, "answered twice"
        found[response.request_id, response.sample] = response
    return found


def queued(server: Server) -> bool:
    return bool(server.sampler._calls)


def wait_until(reached: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(WAIT_S * 100):
        if reached():
            return
        done.wait(0.01)
    raise AssertionError("it did not happen")


def test_work_is_done_by_the_thread_of_the_stream_between_two_polls(
    model: Any, elsewhere: ThreadPoolExecutor
) -> None:
    answers: list[Any] = []
    at: list[tuple[int, int]] = []

    def change() -> str:
        engine.update_weights(None, 1)
        at.append((threading.get_ident(), engine.polls))
        return "changed"

    def before(number: int) -> None:
        if number == 5:
            answers.append(elsewhere.submit(server.sampler.call, change))
            wait_until(lambda: queued(server))

    whole = {r.sample: r.token_ids for r in NativeRollout(model, None).generate(requests("a", n=2))}
    server = Server(engine := Watched(model, before))
    found = collect(server.generate(requests("a", n=2)))
    assert answers[0].result(WAIT_S) == "changed"
    assert at == [(threading.get_ident(), 5)], "in this thread, after the poll in which it came"
    assert {sample: response.token_ids for (_, sample), response in found.items()} == whole


def test_without_a_stream_it_is_done_at_once_and_a_stream_waits_for_it(
    model: Any, elsewhere: ThreadPoolExecutor
) -> None:
    server = Server(engine := Watched(model))
    begun, go_on = threading.Event(), threading.Event()

    def change() -> int:
        begun.set()
        assert go_on.wait(WAIT_S)
        return engine.polls

    answer = elsewhere.submit(server.sampler.call, change)
    assert begun.wait(WAIT_S)
    stream_ended = elsewhere.submit(lambda: collect(server.generate(requests("a"))))
    wait_until(lambda: server._received == 1)
    server.control_submit(requests("b"))
    go_on.set()
    assert answer.result(WAIT_S) == 0, "nothing was generated meanwhile"
    assert set(stream_ended.result(WAIT_S)) == {("a", 0), ("b", 0)}
    assert server.sampler.call(lambda: 7) == 7


def test_a_stream_that_would_end_does_the_work_first(model: Any, elsewhere: ThreadPoolExecutor) -> None:
    """It comes in the poll that gives the last response."""
    answers: list[Any] = []

    class Last(Watched):
        def poll(self, timeout_s: float | None = None) -> list[Response]:
            responses = super().poll(timeout_s)
            if responses and not answers:
                answers.append(elsewhere.submit(server.sampler.call, threading.get_ident))
                wait_until(lambda: queued(server))
            return responses

    server = Server(Last(model))
    assert set(collect(server.generate(requests("a")))) == {("a", 0)}
    assert answers[0].result(WAIT_S) == threading.get_ident()


@pytest.mark.parametrize("ends", ["by an error of the engine", "because it is closed"])
def test_a_stream_that_breaks_off_leaves_the_work_to_its_caller(
    ends: str, model: Any, elsewhere: ThreadPoolExecutor
) -> None:
    answers: list[Any] = []

    def come() -> None:
        answers.append(elsewhere.submit(server.sampler.call, threading.get_ident))
        wait_until(lambda: queued(server))

    def before(number: int) -> None:
        if number == 3 and ends == "by an error of the engine":
            come()
            raise KeyError(number)

    server = Server(Watched(model, before))
    short = requests("short", sampling=SamplingParams(max_tokens=1, ignore_eos=True))
    lists = server.generate([*short, *requests("long")])
    if ends == "because it is closed":
        next(lists)
        come()
        lists.close()
    else:
        with pytest.raises(KeyError), closing(lists):
            collect(lists)
    assert answers[0].result(WAIT_S) != threading.get_ident()


def test_a_failure_of_the_work_is_answered_and_the_stream_goes_on(
    model: Any, elsewhere: ThreadPoolExecutor
) -> None:
    seen: list[str] = []

    def change() -> None:
        seen.append(server.control_status().call)
        raise KeyError("the reason")

    def before(number: int) -> None:
        if number == 3:
            seen.append(server.control_status().call)
            answers.append(elsewhere.submit(server.serve_between_polls, "change"))
            wait_until(lambda: queued(server))
        if number == 5:
            assert server.control_abort(["b"]), "other calls are answered"

    answers: list[Any] = []
    server = Changing(Watched(model, before), change)
    server.control_submit(requests("a", "b"))
    outcomes = list(server.stream("generate", 1))
    assert all(outcome.failure is None for outcome in outcomes)
    found = collect(outcome.value for outcome in outcomes)
    assert [found[name, 0].finish_reason for name in ("a", "b")] == ["length", "abort"]
    failure = answers[0].result(WAIT_S).failure
    assert (failure.call, failure.kind) == ("change", "KeyError") and "the reason" in failure.message
    assert seen == ["generate", "change"]


def test_the_status_is_that_of_the_work_while_a_stream_waits_for_it(
    model: Any, elsewhere: ThreadPoolExecutor
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def change() -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    server = Changing(Watched(model, lambda number: seen.append(server.control_status().call)), change)
    answer = elsewhere.submit(server.serve_between_polls, "change")
    assert begun.wait(WAIT_S)
    server.control_submit(requests("a"))
    generated = elsewhere.submit(lambda: list(server.stream("generate", 1)))
    status = server.control_status()
    assert status.call == "change" and "in wait" in status.stack
    go_on.set()
    assert answer.result(WAIT_S).failure is None and generated.result(WAIT_S)[-1].failure is None
    assert set(seen) == {"generate"}
    assert server.control_status().call == ""


def change_weights(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def test_the_probe_takes_no_response_of_others_and_is_drawn_by_the_new_weights(
    model: Any, elsewhere: ThreadPoolExecutor
) -> None:
    """Samples that end while the probe is generated belong to the stream."""
    answers: list[Any] = []
    during: list[str] = []

    def keep(responses: list[Response]) -> None:
        during.extend(response.request_id for response in responses)
        server.sampler.deliver(responses)

    def sync() -> Any:
        change_weights(model)
        engine.update_weights(None, 1)
        return report(engine, WeightManifest(), INFO, RolloutConfig(), keep)

    def before(number: int) -> None:
        if number == 3:
            answers.append(elsewhere.submit(server.sampler.call, sync))
            wait_until(lambda: queued(server))

    server = Server(engine := Watched(model, before))
    soon = requests("soon", n=2, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    found = collect(server.generate([*soon, *requests("a", "b")]))
    assert set(found) == {("soon", 0), ("soon", 1), ("a", 0), ("b", 0)}
    assert during == ["soon", "soon"]
    assert all(response.finish_reason == "length" for response in found.values())
    fresh = report(
        NativeRollout(model, None), WeightManifest(), INFO, RolloutConfig(), lambda responses: None
    )
    arrival = answers[0].result(WAIT_S)
    assert sorted(arrival.tokens) == sorted(fresh.tokens) and len(arrival.tokens) == SAMPLES


def test_a_full_engine_is_not_probed(
    model: Any, elsewhere: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come to the probe after samples that may be long: not at all, or not in time."""
    answers: list[Any] = []

    def sync(max_running: int) -> Any:
        return report(
            engine, WeightManifest(), INFO, RolloutConfig(max_num_seqs=max_running), server.sampler.deliver
        )

    def before(number: int) -> None:
        if number in (2, 4):
            running = 2 + SAMPLES - (number == 2)
            answers.append(elsewhere.submit(server.sampler.call, lambda: sync(running)))
            wait_until(lambda: queued(server))

    monkeypatch.setattr(broadcast, "PROBE_S", -1.0)
    server = Server(engine := Watched(model, before))
    assert set(collect(server.generate(requests("a", "b")))) == {("a", 0), ("b", 0)}
    full, late = (answer.result(WAIT_S) for answer in answers)
    assert (
        (full.prompt, full.tokens, full.log_probs) == (late.prompt, late.tokens, late.log_probs) == ((),) * 3
    )
    assert not engine.stats().running and not engine.stats().waiting
