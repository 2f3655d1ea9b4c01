"""Streams of samples over the native engine: the same as `generate` when nothing interrupts them, and nothing lost,
doubled or mislabelled when something does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.checkpoint.state import encode, read_tree, save_tree
from verl.checkpoint.tensors import read_tensors
from verl.data.proto import DataProto, object_column
from verl.errors import RolloutError
from verl.rollout import Request, Response, SamplingParams
from verl.rollout.base import BatchEngine, GenerationSettings
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.requests import joined
from verl.rollout.samples import Finished, ResponseStream

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


def drain(stream: ResponseStream) -> list[Finished]:
    found: list[Finished] = []
    while stream.outstanding:
        found += stream.poll()
    assert stream.poll() == []
    return found


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
    stream = ResponseStream(build())
    stream.add(prompts_of("b", "a", "c"), SETTINGS)
    assert stream.outstanding == 9
    found = table(drain(stream))
    assert found == generated(build(), "b", "a", "c")
    assert {response.finish_reason for response in found.values()} == {"stop", "length"}
    check(model, found)


def test_draws_do_not_depend_on_what_is_added_when(build: Callable[..., NativeRollout]) -> None:
    whole = generated(build(), "a", "b", "c", "d")
    stream = ResponseStream(build())
    found: list[Finished] = []
    for uid in "abcd":
        stream.add(prompts_of(uid), SETTINGS)
        found += stream.poll(0)
        found += stream.poll(0)
    together = table([*found, *drain(stream)])
    assert {name: r.token_ids for name, r in together.items()} == {n: r.token_ids for n, r in whole.items()}


def test_a_prefix_names_the_group_and_leaves_the_draws(build: Callable[..., NativeRollout]) -> None:
    stream = ResponseStream(build())
    stream.add(prompts_of("a"), SETTINGS)
    stream.add(prompts_of("a"), replace(SETTINGS, n=1), prefix="val/")
    with pytest.raises(RolloutError, match="prompt 'val/a' are being generated already"):
        stream.add(prompts_of("a"), SETTINGS, prefix="val/")
    found = table(drain(stream))
    assert set(found) == {*names("a"), ("val/a", 0)}
    assert found["val/a", 0].token_ids == found["a", 0].token_ids


def interrupted(stream: ResponseStream, polls: int) -> list[Finished]:
    """Suspended after so many steps; what had ended until then."""
    found: list[Finished] = []
    for _ in range(polls):
        found += stream.poll(0)
    stream.suspend()
    found += stream.poll()
    assert stream.poll() == []
    return found


def test_every_sample_comes_once_wherever_it_is_suspended(
    build: Callable[..., NativeRollout], model: Any
) -> None:
    settings = replace(SETTINGS, sampling=replace(SETTINGS.sampling, max_tokens=8))
    whole = generated(build(), "a", "b", settings=settings)
    cut = 0
    for polls in itertools.count():
        stream = ResponseStream(engine := build())
        stream.add(prompts_of("a", "b"), settings)
        early = interrupted(stream, polls)
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert all(each.result == whole[each.group, each.sample] for each in early)
        kept = {(r.request_id, r.sample): r for r in stream._requests.unfinished()}
        cut += len(kept)
        stream.resume()
        found = table([*early, *drain(stream)])
        assert set(found) == names("a", "b")
        check(model, found, settings.sampling)
        for name, response in kept.items():
            assert response.token_ids == found[name].token_ids[: len(response.token_ids)]
            assert response.token_ids == whole[name].token_ids[: len(response.token_ids)]
        if not kept and len(early) == len(whole):
            break
    assert cut > 5


def test_a_sample_suspended_again_and_again(build: Callable[..., NativeRollout], model: Any) -> None:
    stream = ResponseStream(build(max_num_seqs=4))
    stream.add(prompts_of("a", "b"), SETTINGS)
    stream.suspend()
    stream.suspend()
    stream.add(prompts_of("c"), SETTINGS)
    assert stream.outstanding == 9 and stream.poll() == []
    found: list[Finished] = []
    while stream.outstanding:
        stream.resume()
        stream.resume()
        found += interrupted(stream, 2)
    assert set(table(found)) == names("a", "b", "c")
    check(model, table(found))
    assert any(len(response.token_ids) == 12 for response in table(found).values())


def test_one_sample_per_prompt_is_the_same_however_often_it_is_suspended(
    build: Callable[..., NativeRollout],
) -> None:
    settings = replace(SETTINGS, n=1)
    stream = ResponseStream(build())
    stream.add(prompts_of(*"abcd"), settings)
    found: list[Finished] = []
    while stream.outstanding:
        stream.resume()
        found += interrupted(stream, 2)
    whole = generated(build(), *"abcd", settings=settings)
    for name, response in table(found).items():
        assert response.token_ids == whole[name].token_ids
        assert response.log_probs == pytest.approx(whole[name].log_probs, abs=1e-5)


def test_resumed_samples_of_a_prompt_do_not_repeat_each_other(build: Callable[..., NativeRollout]) -> None:
    """At this temperature a draw depends on its key alone."""
    settings = GenerationSettings(SamplingParams(max_tokens=30, temperature=1e6, ignore_eos=True), n=3)
    for polls in (0, 2, 3, 10):
        stream = ResponseStream(build())
        stream.add(prompts_of("a"), settings)
        interrupted(stream, polls)
        stream.resume()
        tokens = [response.token_ids for response in table(drain(stream)).values()]
        for one, other in itertools.combinations(tokens, 2):
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 5


def test_each_token_has_the_version_and_the_log_prob_of_the_weights_that_drew_it(
    build: Callable[..., NativeRollout], tiny: Callable[..., Any], model: Any
) -> None:
    models = {0: model, 5: tiny("llama", seed=1), 6: tiny("llama", seed=2)}
    settings = GenerationSettings(SamplingParams(max_tokens=40, ignore_eos=True), n=2, seed=4)
    stream = ResponseStream(engine := build(max_num_seqs=3))
    stream.add(prompts_of("a", "b"), settings)
    found = interrupted(stream, 4)
    for version in (5, 6):
        engine.update_weights(models[version], version)
        stream.resume()
        found += interrupted(stream, 3)
    stream.resume()
    responses = table([*found, *drain(stream)])
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


def saved(stream: ResponseStream, finished: list[Finished], folder: Path) -> Any:
    """What the files of a checkpoint give back."""
    folder.mkdir()
    save_tree(folder, "samples", encode(stream.pack(finished)))
    return read_tree(folder / "samples.json", read_tensors([folder / "samples.safetensors"]))


@pytest.mark.parametrize("polls", [0, 3, 6])
def test_a_checkpoint_continues_as_if_nothing_had_happened(
    build: Callable[..., NativeRollout], tmp_path: Path, polls: int
) -> None:
    """Some groups have samples of all kinds: finished, begun, and not yet started."""
    stream = ResponseStream(engine := build(max_num_seqs=5))
    stream.add(prompts_of("a", "b", "c"), SETTINGS)
    early = interrupted(stream, polls)
    engine.update_weights(None, 2)
    other = ResponseStream(build(max_num_seqs=5))
    other._requests.engine.update_weights(None, 2)
    packed = saved(stream, early, tmp_path / "first")
    other.unpack(packed, ["a", "c"])
    stream.resume()
    expected = table([*early, *drain(stream)])
    again = saved(other, [], tmp_path / "second")
    other.unpack(again, ["a", "c", "b"])
    other.add(prompts_of("a", "c"), SETTINGS)
    found = table(drain(other))
    assert set(found) == names("a", "c")
    for name, response in found.items():
        assert response.token_ids == expected[name].token_ids
        assert response.log_probs == pytest.approx(expected[name].log_probs, abs=1e-5)
        assert response.versions == expected[name].versions
    for each in early:
        if each.group != "b":
            assert found[each.group, each.sample] == each.result, "bit for bit"
    if polls == 6:
        assert early and any(len(set(response.versions)) == 2 for response in found.values())


def test_what_is_finished_is_not_generated_again(build: Callable[..., NativeRollout], tmp_path: Path) -> None:
    stream = ResponseStream(build())
    stream.add(prompts_of("a", "b"), SETTINGS)
    finished = drain(stream)
    other = ResponseStream(engine := build())
    other.unpack(saved(stream, finished, tmp_path / "saved"), ["a", "b"])
    other.add(prompts_of("b", "a"), SETTINGS)
    assert table(drain(other)) == table(finished)
    assert engine.stats().generated_tokens == 0
    other.add(prompts_of("a"), SETTINGS)
    assert len(drain(other)) == 3 and engine.stats().generated_tokens > 0, "only once"


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
    stream = ResponseStream(Odd())
    stream.add(prompts_of("a"), SETTINGS)
    with pytest.raises(RolloutError, match=r"Odd cannot abort requests.*actor_rollout_ref\.rollout\.name"):
        stream.suspend()
    assert len(drain(stream)) == 3, "nothing is lost"


class Late(Odd):
    """Everything has ended when it is told to abort."""

    def abort_batch(self, request_ids: list[str] | None) -> None:
        pass


def test_a_sample_that_ends_while_it_is_suspended_is_finished() -> None:
    stream = ResponseStream(Late())
    stream.add(prompts_of("a"), SETTINGS)
    stream.suspend()
    other = ResponseStream(engine := Late())
    other.unpack(stream.pack([]), ["a"])
    other.add(prompts_of("a"), SETTINGS)
    assert table(drain(other)) == table(drain(stream))
    assert engine.stats().generated_tokens == 0


def test_an_answer_nobody_asked_for_is_refused() -> None:
    for extra in (Response("a", 0, [1], [-1.0], "stop"), Response("x", 0, [1], [-1.0], "stop")):
        engine = Odd()
        engine.extra = (extra,)
        stream = ResponseStream(engine)
        stream.add(prompts_of("a"), SETTINGS)
        for _ in range(2):
            stream.poll()
        stream.add(prompts_of("b"), SETTINGS)
        stream.poll()
        with pytest.raises(RolloutError, match=f"Odd answered sample 0 of request '{extra.request_id}'"):
            stream.poll()


def test_uids_must_differ_and_nothing_is_started_otherwise(build: Callable[..., NativeRollout]) -> None:
    stream = ResponseStream(engine := build())
    with pytest.raises(RolloutError, match="share a uid"):
        stream.add(prompts_of("a", "a"), SETTINGS)
    with pytest.raises(RolloutError, match="temperature is -1"):
        stream.add(prompts_of("a"), replace(SETTINGS, sampling=SamplingParams(temperature=-1)))
    assert stream.outstanding == 0 and engine.stats().waiting == 0
    stream.add(prompts_of("a"), SETTINGS)
    assert len(drain(stream)) == 3


def test_abort_leaves_the_engine_idle_also_after_its_error(
    build: Callable[..., NativeRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ResponseStream(engine := build())
    for suspended in (False, True):
        stream.add(prompts_of("a", "b"), SETTINGS)
        interrupted(stream, 3)
        if not suspended:
            stream.resume()
        stream.abort()
        assert stream.outstanding == 0 and stream.poll() == []
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    stream.add(prompts_of("a"), SETTINGS)
    assert table(drain(stream)) == generated(build(), "a"), "and it can be used again"

    def fail(*_: Any) -> Any:
        raise RuntimeError("as planned")

    stream.add(prompts_of("a"), SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "poll", fail)
        with pytest.raises(RuntimeError, match="as planned"):
            stream.poll()
        stream.abort()
    assert stream.outstanding == 0
