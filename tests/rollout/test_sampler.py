"""Samples over the native engine: the same as `generate` when nothing interrupts them, and nothing lost,
doubled or mislabelled when something does."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.collected import Collected
from verl.checkpoint.state import encode, read_tree, save_tree
from verl.checkpoint.tensors import read_tensors
from verl.data.proto import DataProto, object_column
from verl.errors import RolloutError
from verl.rollout import Request, Response, SamplingParams
from verl.rollout.base import BatchEngine, GenerationSettings, RolloutEngine, RolloutStats
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.sampler import Sampler
from verl.rollout.samples import Finished, joined, unpack_responses

SETTINGS = GenerationSettings(SamplingParams(max_tokens=12, stop_token_ids=(3, 4, 5)), n=3, seed=4)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Any]) -> Any:
    return tiny("llama")


@pytest.fixture(params=[False, True], ids=["cpu path", "device path"])
def build(request: Any, model: Any) -> Callable[..., NativeRollout]:
    def engine(source: Any = None, **limits: Any) -> NativeRollout:
        settings = Limits(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **limits})
        return NativeRollout(source or model, None, settings, on_device=request.param, verify=False)

    return engine


def prompts_of(*uids: str) -> DataProto:
    """The prompt of a uid is a function of it."""
    ids = [[10 + ord(letter) % 80 for letter in uid * 3] for uid in uids]
    return DataProto.from_dict(non_tensors={"uid": object_column(uids), "prompt_ids": object_column(ids)})


def generated(
    engine: NativeRollout, *uids: str, settings: GenerationSettings = SETTINGS
) -> dict[Any, Response]:
    columns = prompts_of(*uids).non_tensor_batch
    requests = [
        Request(uid, ids, settings.sampling, n=settings.n, seed=settings.seed)
        for uid, ids in zip(columns["uid"], columns["prompt_ids"], strict=True)
    ]
    return {(r.request_id, r.sample): r for r in engine.generate(requests)}


def table(found: Iterable[Finished]) -> dict[Any, Response]:
    """By group and sample, each of them once."""
    found = list(found)
    by_name = {(each.group, each.sample): each.result for each in found}
    assert len(by_name) == len(found), "a sample came twice"
    for (group, sample), response in by_name.items():
        assert (response.request_id, response.sample) == (group, sample)
    return by_name


def names(*uids: str, n: int = SETTINGS.n) -> set[tuple[str, int]]:
    return {(uid, sample) for uid in uids for sample in range(n)}


def check(model: Any, responses: dict[Any, Response], sampling: SamplingParams = SETTINGS.sampling) -> None:
    """Lengths and ends are as asked for, and log-probs those of the model."""
    for (group, _), response in responses.items():
        tokens = response.token_ids
        stops = [at for at, token in enumerate(tokens) if token in (*sampling.stop_token_ids, 2)]
        if response.finish_reason == "stop":
            assert stops == [len(tokens) - 1]
        else:
            assert (response.finish_reason, len(tokens), stops) == ("length", sampling.max_tokens, [])
        ids = prompts_of(group.rpartition("/")[2]).non_tensor_batch["prompt_ids"][0]
        assert response.log_probs == pytest.approx(log_probs(model, ids, tokens), abs=1e-5)


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor([tokens]).T)[:, 0].tolist()


def test_uninterrupted_it_is_what_the_engine_generates(
    build: Callable[..., NativeRollout], model: Any
) -> None:
    samples = Collected(Sampler(build()))
    samples.add(prompts_of("b", "a", "c"), SETTINGS)
    assert samples.sampler.outstanding == 9
    found = table(samples.drain())
    assert found == generated(build(), "b", "a", "c")
    assert {response.finish_reason for response in found.values()} == {"stop", "length"}
    check(model, found)


def test_draws_do_not_depend_on_what_is_added_when(build: Callable[..., NativeRollout]) -> None:
    whole = generated(build(), "a", "b", "c", "d")
    samples = Collected(Sampler(build()))
    for uid in "abcd":
        samples.add(prompts_of(uid), SETTINGS)
        samples.steps(2)
    together = table(samples.drain())
    assert {name: r.token_ids for name, r in together.items()} == {n: r.token_ids for n, r in whole.items()}


def test_a_prefix_names_the_group_and_leaves_the_draws(build: Callable[..., NativeRollout]) -> None:
    samples = Collected(Sampler(build()))
    samples.add(prompts_of("a"), SETTINGS)
    samples.add(prompts_of("a"), replace(SETTINGS, n=1), prefix="val/")
    with pytest.raises(RolloutError, match="prompt 'val/a' are being generated already"):
        samples.add(prompts_of("a"), SETTINGS, prefix="val/")
    found = table(samples.drain())
    assert set(found) == {*names("a"), ("val/a", 0)}
    assert found["val/a", 0].token_ids == found["a", 0].token_ids


def interrupted(samples: Collected, steps: int) -> None:
    """Suspended after so many steps."""
    samples.steps(steps)
    samples.sampler.suspend()


def unfinished(samples: Collected) -> dict[Any, Response]:
    packed = unpack_responses(samples.sampler.pack([])["unfinished"])
    return {(response.request_id, response.sample): response for response in packed}


def test_every_sample_comes_once_wherever_it_is_suspended(
    build: Callable[..., NativeRollout], model: Any
) -> None:
    settings = replace(SETTINGS, sampling=replace(SETTINGS.sampling, max_tokens=8))
    whole = generated(build(), "a", "b", settings=settings)
    cut = 0
    for steps in itertools.count():
        samples = Collected(Sampler(engine := build()))
        samples.add(prompts_of("a", "b"), settings)
        interrupted(samples, steps)
        early = list(samples.finished)
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert all(each.result == whole[each.group, each.sample] for each in early)
        kept = unfinished(samples)
        cut += len(kept)
        samples.sampler.resume()
        found = table(samples.drain())
        assert set(found) == names("a", "b")
        check(model, found, settings.sampling)
        for name, response in kept.items():
            assert response.token_ids == found[name].token_ids[: len(response.token_ids)]
            assert response.token_ids == whole[name].token_ids[: len(response.token_ids)]
        if not kept and len(early) == len(whole):
            break
    assert cut > 5


def test_a_sample_suspended_again_and_again(build: Callable[..., NativeRollout], model: Any) -> None:
    samples = Collected(Sampler(build(max_num_seqs=4)))
    samples.add(prompts_of("a", "b"), SETTINGS)
    samples.sampler.suspend()
    samples.sampler.suspend()
    samples.add(prompts_of("c"), SETTINGS)
    assert samples.sampler.outstanding == 9 and not samples.finished
    while samples.sampler.outstanding:
        samples.sampler.resume()
        samples.sampler.resume()
        interrupted(samples, 2)
    found = table(samples.finished)
    assert set(found) == names("a", "b", "c")
    check(model, found)
    assert any(len(response.token_ids) == 12 for response in found.values())


def test_one_sample_per_prompt_is_the_same_however_often_it_is_suspended(
    build: Callable[..., NativeRollout],
) -> None:
    settings = replace(SETTINGS, n=1)
    samples = Collected(Sampler(build()))
    samples.add(prompts_of(*"abcd"), settings)
    while samples.sampler.outstanding:
        samples.sampler.resume()
        interrupted(samples, 2)
    whole = generated(build(), *"abcd", settings=settings)
    for name, response in table(samples.finished).items():
        assert response.token_ids == whole[name].token_ids
        assert response.log_probs == pytest.approx(whole[name].log_probs, abs=1e-5)


def test_resumed_samples_of_a_prompt_do_not_repeat_each_other(build: Callable[..., NativeRollout]) -> None:
    """At this temperature a draw depends on its key alone."""
    settings = GenerationSettings(SamplingParams(max_tokens=30, temperature=1e6, ignore_eos=True), n=3)
    for steps in (0, 2, 3, 10):
        samples = Collected(Sampler(build()))
        samples.add(prompts_of("a"), settings)
        interrupted(samples, steps)
        samples.sampler.resume()
        tokens = [response.token_ids for response in table(samples.drain()).values()]
        for one, other in itertools.combinations(tokens, 2):
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 5


def test_each_token_has_the_version_and_the_log_prob_of_the_weights_that_drew_it(
    build: Callable[..., NativeRollout], tiny: Callable[..., Any], model: Any
) -> None:
    models = {0: model, 5: tiny("llama", seed=1), 6: tiny("llama", seed=2)}
    settings = GenerationSettings(SamplingParams(max_tokens=40, ignore_eos=True), n=2, seed=4)
    samples = Collected(Sampler(engine := build(max_num_seqs=3)))
    samples.add(prompts_of("a", "b"), settings)
    interrupted(samples, 4)
    for version in (5, 6):
        engine.update_weights(models[version], version)
        samples.sampler.resume()
        interrupted(samples, 3)
    samples.sampler.resume()
    responses = table(samples.drain())
    assert set(responses) == names("a", "b", n=2)
    seen: set[int] = set()
    for (group, _), response in responses.items():
        prompt = prompts_of(group).non_tensor_batch["prompt_ids"][0]
        expected = {v: log_probs(each, prompt, response.token_ids) for v, each in models.items()}
        by_version = [expected[version][at] for at, version in enumerate(response.versions)]
        assert response.log_probs == pytest.approx(by_version, abs=1e-5)
        assert response.versions == sorted(response.versions)
        assert response.policy_version == response.versions[0]
        seen |= set(response.versions)
    assert seen == {0, 5, 6}
    assert max(len(set(response.versions)) for response in responses.values()) > 1


def test_parts_are_joined_with_their_versions() -> None:
    first = Response("a", 1, [1, 2], [-0.1, -0.2], "abort", 3, [(1, 4)])
    rest = Response("a", 1, [3, 4], [-0.3, -0.4], "stop", 4, [(1, 6)])
    whole = joined(first, rest)
    assert whole == Response("a", 1, [1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4], "stop", 3, [(1, 4), (3, 6)])
    assert whole.versions == [3, 4, 4, 6]
    nothing = Response("a", 1, [], [], "abort", 9, [(0, 9)])
    assert joined(whole, nothing).versions == [3, 4, 4, 6]
    assert joined(first, Response("a", 1, [3], [-0.3], "stop", 7)).versions == [3, 4, 7]


# ---- checkpoints


def saved(samples: Collected, folder: Path) -> Any:
    """What the files of a checkpoint give back."""
    folder.mkdir()
    save_tree(folder, "samples", encode(samples.sampler.pack(samples.finished)))
    return read_tree(folder / "samples.json", read_tensors([folder / "samples.safetensors"]))


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_a_checkpoint_continues_as_if_nothing_had_happened(
    build: Callable[..., NativeRollout], tmp_path: Path, steps: int
) -> None:
    """Some groups have samples of all kinds: finished, begun, and not yet started."""
    samples = Collected(Sampler(engine := build(max_num_seqs=5)))
    samples.add(prompts_of("a", "b", "c"), SETTINGS)
    interrupted(samples, steps)
    early = list(samples.finished)
    engine.update_weights(None, 2)
    other = Collected(Sampler(build(max_num_seqs=5)))
    other.sampler.engine.update_weights(None, 2)
    kept = other.sampler.unpack(saved(samples, tmp_path / "saved"), ["a", "c"])
    samples.sampler.resume()
    expected = table(samples.drain())
    other.add(prompts_of("a", "c"), SETTINGS, kept=kept)
    found = table(other.drain())
    assert set(found) == names("a", "c")
    for name, response in found.items():
        assert response.token_ids == expected[name].token_ids
        assert response.log_probs == pytest.approx(expected[name].log_probs, abs=1e-5)
        assert response.versions == expected[name].versions
    for each in early:
        if each.group != "b":
            assert found[each.group, each.sample] == each.result, "bit for bit"
    if steps == 6:
        assert early and any(len(set(response.versions)) == 2 for response in found.values())


def test_what_is_finished_is_not_generated_again(build: Callable[..., NativeRollout], tmp_path: Path) -> None:
    samples = Collected(Sampler(build()))
    samples.add(prompts_of("a", "b"), SETTINGS)
    samples.drain()
    other = Collected(Sampler(engine := build()))
    kept = other.sampler.unpack(saved(samples, tmp_path / "saved"), ["a", "b"])
    other.add(prompts_of("b", "a"), SETTINGS, kept=kept)
    assert table(other.drain()) == table(samples.finished)
    assert engine.stats().generated_tokens == 0


# ---- samples that are not waited for


def test_the_last_samples_are_ended_early_and_the_others_are_those_of_a_whole_generation(
    build: Callable[..., NativeRollout],
) -> None:
    asked = replace(SETTINGS, n=4)
    whole, engine = generated(build(), "a", "b", "c", settings=asked), build(max_num_seqs=7)
    told: list[int] = []
    found = Sampler(engine).collect(
        prompts_of("a", "b", "c"), replace(asked, over_sample_rate=0.3), lambda row, _: told.append(row)
    )
    ended = [each for each in found if each.finish_reason != "abort"]
    assert 9 <= len(ended) < 12, "3 of 12 need not end"
    for each in found:
        same = whole[each.request_id, each.sample]
        assert each.token_ids == same.token_ids[: len(each.token_ids)]
        assert each in ended or len(each.token_ids) < len(same.token_ids)
    assert [each.token_ids for each in ended] == [
        whole[each.request_id, each.sample].token_ids for each in ended
    ]
    assert sorted(told) == list(range(12)), "each was told once"
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.kv_blocks_used == 0


def test_the_samples_of_an_engine_that_cannot_abort_cannot_be_ended_early() -> None:
    with pytest.raises(RolloutError, match=r"Odd cannot abort requests.*over_sample_rate=0"):
        Sampler(Odd()).collect(prompts_of("a", "b"), replace(SETTINGS, over_sample_rate=0.5))


# ---- what goes wrong


class Odd(BatchEngine):
    """Answers with one token, and cannot abort."""

    extra: tuple[Response, ...] = ()

    def update_weights(self, source: Any, version: int) -> None:
        raise NotImplementedError

    def run_batch(self, requests: list[Request]) -> Any:
        for request in requests:
            for sample in range(request.n):
                yield Response(request.request_id, sample, [sample], [-0.1], "stop")
        yield from self.extra


def test_an_engine_that_cannot_abort_cannot_be_suspended() -> None:
    samples = Collected(Sampler(Odd()))
    samples.add(prompts_of("a"), SETTINGS)
    with pytest.raises(RolloutError, match=r"Odd cannot abort requests.*actor_rollout_ref\.rollout\.name"):
        samples.sampler.suspend()
    assert len(samples.drain()) == 3, "nothing is lost"


class Late(Odd):
    """Everything has ended when it is told to abort."""

    def abort_batch(self, request_ids: list[str] | None) -> None:
        pass


def test_a_sample_that_ends_while_it_is_suspended_is_finished() -> None:
    samples = Collected(Sampler(Late()))
    samples.add(prompts_of("a"), SETTINGS)
    samples.sampler.suspend()
    assert set(table(samples.finished)) == names("a") and not unfinished(samples)


def test_an_answer_nobody_asked_for_is_refused() -> None:
    for extra in (Response("a", 0, [1], [-1.0], "stop"), Response("x", 0, [1], [-1.0], "stop")):
        engine = Odd()
        engine.extra = (extra,)
        samples = Collected(Sampler(engine))
        samples.add(prompts_of("a"), SETTINGS)
        samples.steps(3)
        samples.add(prompts_of("b"), SETTINGS)
        with pytest.raises(RolloutError, match=f"Odd answered sample 0 of request '{extra.request_id}'"):
            samples.drain()


def test_uids_must_differ_and_nothing_is_started_otherwise(build: Callable[..., NativeRollout]) -> None:
    samples = Collected(Sampler(engine := build()))
    with pytest.raises(RolloutError, match="share a uid"):
        samples.add(prompts_of("a", "a"), SETTINGS)
    with pytest.raises(RolloutError, match="temperature is -1"):
        samples.add(prompts_of("a"), replace(SETTINGS, sampling=SamplingParams(temperature=-1)))
    assert samples.sampler.outstanding == 0 and engine.stats().waiting == 0
    samples.add(prompts_of("a"), SETTINGS)
    assert len(samples.drain()) == 3


def test_abort_leaves_the_engine_idle_also_after_its_error(
    build: Callable[..., NativeRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Collected(Sampler(engine := build()))
    for suspended in (False, True):
        samples.add(prompts_of("a", "b"), SETTINGS)
        interrupted(samples, 3)
        if not suspended:
            samples.sampler.resume()
        samples.sampler.abort()
        assert samples.sampler.outstanding == 0
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    samples.finished.clear()
    samples.add(prompts_of("a"), SETTINGS)
    assert table(samples.drain()) == generated(build(), "a"), "and it can be used again"

    def fail(*_: Any) -> Any:
        raise RuntimeError("as planned")

    samples.add(prompts_of("a"), SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "poll", fail)
        with pytest.raises(RuntimeError, match="as planned"):
            samples.drain()
    assert samples.sampler.outstanding == 0


# ---- many callers


class Slow(RolloutEngine):
    """Steps by hand: which samples end in a poll, and whether it fails, is drawn by the test."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose, self.version, self.lock = choose, 0, threading.Lock()
        self.running: dict[tuple[str, int], tuple[Request, list[int], list[int]]] = {}
        self.aborted: set[str] = set()
        self.fails = False

    def submit(self, requests: Iterable[Request]) -> None:
        with self.lock:
            for request in requests:
                for sample in range(request.n):
                    assert (request.request_id, sample) not in self.running, "an id is there twice"
                    done = len(request.partial[sample]) if request.partial else 0
                    self.running[request.request_id, sample] = (request, [done], [])

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        with self.lock:
            if self.fails:
                self.fails = False
                self.running.clear()
                raise RuntimeError("as planned")
            ended = []
            for name, (request, (done,), versions) in list(self.running.items()):
                if request.request_id in self.aborted:
                    reason: Any = "abort"
                else:
                    versions.append(self.version)
                    whole = done + len(versions) >= request.sampling.max_tokens
                    reason = "length" if whole else None
                if reason is not None and (reason == "length" or not self.choose(3)):
                    tokens = list(range(done, done + len(versions)))
                    changes = [(at, v) for at, v in enumerate(versions) if at and versions[at - 1] != v]
                    first = versions[0] if versions else self.version
                    ended.append(Response(*name, tokens, [-1.0] * len(tokens), reason, first, changes))
                    del self.running[name]
            return ended

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        with self.lock:
            self.aborted |= {name for name, _ in self.running} if request_ids is None else set(request_ids)

    def update_weights(self, source: Any, version: int) -> None:
        self.version = version

    def stats(self) -> RolloutStats:
        return RolloutStats(running=len(self.running))


ACTIONS = ("submit", "ask", "cancel", "step", "suspend", "resume", "weights", "fail")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=60), st.randoms())
def test_every_request_is_answered_once_whatever_happens(steps: list[tuple[str, int]], draws: Any) -> None:
    engine = Slow(draws.randrange)
    sampler = Sampler(engine)
    sampler.poll_s = 0.0
    answers: dict[tuple[str, int], Response] = {}
    asked: dict[str, asyncio.Task[Response]] = {}
    submitted: dict[str, Request] = {}
    failed: set[str] = set()

    def deliver(response: Response) -> None:
        assert (response.request_id, response.sample) not in answers, "answered twice"
        answers[response.request_id, response.sample] = response

    async def go() -> None:
        for number, (action, argument) in enumerate(steps):
            engine.aborted = {name for name in engine.aborted if any(name == n for n, _ in engine.running)}
            request = Request(
                f"r{number}", (1, 2), SamplingParams(max_tokens=1 + argument), n=1 + argument % 3
            )
            if action == "submit":
                sampler.submit([request], deliver)
                submitted[request.request_id] = request
                with pytest.raises(RolloutError, match="are being generated already"):
                    sampler.submit([request], deliver)
            elif action == "ask":
                asked[request.request_id] = asyncio.ensure_future(sampler.sample(replace(request, n=1)))
            elif action == "cancel":
                sampler.cancel([f"r{argument * 3}"])
                for task in list(asked.values())[:argument]:
                    task.cancel()
            elif action == "suspend":
                sampler.suspend()
                assert not engine.running
            elif action == "resume":
                sampler.resume()
            elif action == "weights":
                sampler.call(lambda number=number: engine.update_weights(None, number))
            elif action == "fail" and engine.running:
                engine.fails = True
                failed.update(name for name in submitted if name in sampler._tasks)
                with pytest.raises(RuntimeError, match="as planned"):
                    sampler.run(lambda: False)
            else:
                polled = itertools.count()
                sampler.run(lambda polled=polled: next(polled) >= 1 or not sampler._sent)
            await asyncio.sleep(0)
        sampler.resume()
        await asyncio.sleep(0)
        sampler.run(lambda: not sampler._tasks)
        for name, task in asked.items():
            with suppress(asyncio.CancelledError, RuntimeError):
                response = await asyncio.wait_for(task, 60)
                assert (response.request_id, response.sample) == (name, 0)

    asyncio.run(go())
    expected = {(name, s) for name, r in submitted.items() if name not in failed for s in range(r.n)}
    assert expected <= set(answers) <= expected | {(n, s) for n in failed for s in range(submitted[n].n)}
    for (name, _), response in answers.items():
        assert response.token_ids == list(range(len(response.token_ids))), "the parts in their order"
        if response.finish_reason == "length":
            assert len(response.token_ids) == submitted[name].sampling.max_tokens
        assert response.versions == sorted(response.versions)
    assert not (sampler._tasks or sampler._sent or sampler._deliveries or sampler._calls or engine.running)


def test_requests_come_from_any_coroutine_while_another_thread_drives(
    build: Callable[..., NativeRollout],
) -> None:
    sampler, ended = Sampler(build()), threading.Event()
    whole = generated(build(), *"abcdef", settings=replace(SETTINGS, n=1))
    driver = threading.Thread(target=lambda: sampler.run(ended.is_set, serve=True))
    driver.start()

    async def ask() -> dict[Any, Response]:
        columns = prompts_of(*"abcdef").non_tensor_batch
        requests = [
            Request(uid, ids, SETTINGS.sampling, seed=SETTINGS.seed)
            for uid, ids in zip(columns["uid"], columns["prompt_ids"], strict=True)
        ]
        given_up = asyncio.ensure_future(sampler.sample(replace(requests[0], request_id="given up")))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(RolloutError, match="temperature is -1"):
            await sampler.sample(Request("bad", (5, 6), SamplingParams(temperature=-1)))
        responses = await asyncio.gather(*(sampler.sample(request) for request in requests))
        return {(response.request_id, response.sample): response for response in responses}

    try:
        assert {name: r.token_ids for name, r in asyncio.run(ask()).items()} == {
            name: r.token_ids for name, r in whole.items()
        }
        assert sampler.call(threading.get_ident) == driver.ident
    finally:
        ended.set()
        sampler.call(lambda: None)
        driver.join()
    assert not sampler._tasks
