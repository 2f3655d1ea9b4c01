"""Requests that arrive while others run, conversations that keep their KV cache, and weights that change in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from verl.errors import RolloutError
from verl.rollout import Request, Response, SamplingParams
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.source import ModuleWeights

Engine = Callable[..., NativeRollout]
OPENING = [50 + i for i in range(20)]


@pytest.fixture(params=[False, True], ids=["cpu path", "device path"])
def build(request: Any, tiny: Callable[..., Any]) -> Engine:
    def engine(model: Any = None, **limits: Any) -> NativeRollout:
        settings = Limits(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **limits})
        return NativeRollout(model or tiny("llama"), None, settings, on_device=request.param, verify=False)

    return engine


def request(name: str, length: int, max_tokens: int, **changes: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)
    return Request(name, [*OPENING, *range(3, 3 + length)], sampling, n=2, seed=4)


def drain(engine: NativeRollout, found: dict[tuple[str, int], Response] | None = None) -> dict[Any, Response]:
    found = {} if found is None else found
    while responses := engine.poll():
        for response in responses:
            assert (response.request_id, response.sample) not in found, "answered twice"
            found[response.request_id, response.sample] = response
    return found


def require_equal(found: dict[Any, Response], wanted: dict[Any, Response]) -> None:
    assert found.keys() == wanted.keys()
    for key, response in wanted.items():
        assert found[key].token_ids == response.token_ids, key
        assert found[key].log_probs == pytest.approx(response.log_probs, abs=2e-5)


@pytest.mark.slow(seconds=2)
def test_a_request_gives_the_same_alone_together_and_late(build: Engine) -> None:
    """Later ones are longer, more, and sampled otherwise than those the engine was sized for."""
    requests = [
        request("short", 2, 5),
        request("long", 30, 30),
        request("longer", 60, 80, temperature=0),
        request("filtered", 9, 12, top_p=0.8, repetition_penalty=1.4),
    ]
    together = {(r.request_id, r.sample): r for r in build().generate(requests)}
    alone: dict[Any, Response] = {}
    for asked in requests:
        alone |= {(r.request_id, r.sample): r for r in build().generate([asked])}
    late: dict[Any, Response] = {}
    engine = build()
    for asked in requests:
        engine.submit([asked])
        for response in engine.poll(0):
            late[response.request_id, response.sample] = response
    drain(engine, late)
    require_equal(together, alone)
    require_equal(late, alone)


def test_many_late_requests_run_side_by_side(build: Engine) -> None:
    engine = build()
    engine.submit([request("first", 1, 60)])
    engine.poll(0)
    engine.submit([request(str(i), i, 40) for i in range(6)])
    engine.poll(0)
    engine.poll(0)
    assert engine.stats().running > 2, "sized for the first request"
    assert len(drain(engine)) == 14


def test_other_threads_submit_and_abort_while_one_polls(build: Engine) -> None:
    engine = build()
    engine.submit([request("first", 1, 3)])
    ready = threading.Barrier(3)

    def client(name: str) -> None:
        ready.wait()
        for i in range(5):
            engine.submit([request(f"{name}{i}", i, 4 + i)])
        engine.abort([f"{name}4"])

    threads = [threading.Thread(target=client, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    ready.wait()
    found: dict[Any, Response] = {}
    while any(thread.is_alive() for thread in threads) or len(found) < 22:
        drain(engine, found)
    for thread in threads:
        thread.join()
    assert len(found) == 22 and engine.stats().running == engine.stats().waiting == 0


def test_a_request_that_cannot_be_served_is_refused_while_others_run(build: Engine) -> None:
    engine = build(max_model_len=90)
    engine.submit([request("a", 4, 20)])
    engine.poll(0)
    with pytest.raises(RolloutError, match="the limit is 90"):
        engine.submit([request("b", 4, 20), request("c", 4, 80)])
    assert {name for name, _ in drain(engine)} == {"a"}


class Source(ModuleWeights):
    """Counts who uses the module."""

    users = 0

    @contextmanager
    def module(self) -> Any:
        self.users += 1
        with super().module() as module:
            yield module
        self.users -= 1


def test_the_module_is_used_only_while_requests_are_outstanding(
    build: Engine, tiny: Callable[..., Any]
) -> None:
    source = Source(tiny("llama"))
    engine = build(source)
    engine.submit([request("a", 4, 20)])
    assert source.users == 0
    engine.poll(0)
    assert source.users == 1
    engine.abort()
    assert {r.finish_reason for r in engine.poll()} == {"abort"}
    assert source.users == 0 and engine.poll() == []


def test_an_error_drops_what_is_outstanding_and_leaves_the_engine_usable(
    build: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.submit([request("a", 4, 20, temperature=0)])
    engine.poll(0)
    runner = type(engine.state.runner)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.poll()
    assert engine.poll() == [] and engine.stats().waiting == 0
    assert len(list(engine.generate([request("a", 4, 20)]))) == 2


def turn(
    engine: NativeRollout, name: str, prompt: list[int], conversation: str | None, max_tokens: int = 9
) -> Any:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    before = engine.stats().prefilled_tokens
    (response,) = engine.generate([Request(name, prompt, sampling, prefix_id=conversation)])
    return response, engine.stats().prefilled_tokens - before


def test_a_conversation_prefills_only_what_is_new(build: Engine) -> None:
    engine, plain = build(max_model_len=256), build()
    prompt, blocks = list(OPENING), []
    for number in range(4):
        response, prefilled = turn(engine, f"turn {number}", prompt, "chat")
        wanted, _ = turn(plain, f"turn {number}", prompt, None)
        assert response.token_ids == wanted.token_ids
        assert response.log_probs == pytest.approx(wanted.log_probs, abs=2e-5)
        # The last token was drawn and never seen by the model.
        assert prefilled == (len(OPENING) if number == 0 else 1 + 30)
        blocks.append(engine.stats().kv_blocks_used)
        prompt = [*prompt, *response.token_ids, *[60 + number] * 30]
    assert blocks == sorted(blocks) and blocks[0] > 0
    engine.release(["chat"])
    assert engine.poll() == [] and engine.stats().kv_blocks_used == 0
    _, prefilled = turn(engine, "again", prompt, "chat")
    assert prefilled == len(prompt)


def test_a_conversation_that_ends_with_a_full_block_has_its_blocks_once(build: Engine) -> None:
    """Otherwise conversations hold more pages than there are, and others lose theirs."""
    engine = build(max_model_len=256)
    first, _ = turn(engine, "first", OPENING, "chat", max_tokens=32 + 1 - len(OPENING))
    second, prefilled = turn(engine, "second", [*OPENING, *first.token_ids, 8], "chat", max_tokens=4)
    blocks = engine.stats().kv_blocks_used
    assert prefilled == 2 and blocks > 0
    plain = build(max_model_len=256)
    turn(plain, "all", [*OPENING, *first.token_ids, 8, *second.token_ids[:-1]], "chat", max_tokens=1)
    assert blocks == plain.stats().kv_blocks_used


def test_branches_of_a_conversation_do_not_write_into_each_other(build: Engine) -> None:
    """They share a partly filled last block, one takes it over, and none sees the other's tokens."""
    engine = build()
    first, _ = turn(engine, "first", OPENING, "chat")
    shared = [*OPENING, *first.token_ids]
    sampling = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    branches = [Request(str(i), [*shared, 7 + i, 9], sampling, n=2, prefix_id="chat") for i in range(3)]
    found = {(r.request_id, r.sample): r for r in engine.generate(branches)}
    wanted = {(r.request_id, r.sample): r for r in build().generate(branches)}
    require_equal(found, wanted)
    for i in range(3):  # every branch may go on
        prompt = [*branches[i].prompt_ids, *found[str(i), 1].token_ids, 5]
        again, prefilled = turn(engine, f"more {i}", prompt, "chat")
        assert prefilled == 2
        assert again.token_ids == turn(build(), f"more {i}", prompt, None)[0].token_ids


def test_a_prompt_with_nothing_of_its_conversation_leaves_what_is_kept(build: Engine) -> None:
    engine = build()
    first, _ = turn(engine, "first", OPENING, "chat")
    turn(engine, "other", [9] * 20, "chat")
    _, prefilled = turn(engine, "second", [*OPENING, *first.token_ids, 8], "chat")
    assert prefilled == 2


def test_a_prompt_that_diverges_from_its_conversation_is_computed_from_there(build: Engine) -> None:
    engine = build()
    first, _ = turn(engine, "first", [*OPENING, 3, 4, 5], "chat")
    edited = [*OPENING, 3, 9, *first.token_ids]
    second, prefilled = turn(engine, "second", edited, "chat")
    assert prefilled == len(edited) - len(OPENING) - 1
    assert second.token_ids == turn(build(), "second", edited, None)[0].token_ids


@pytest.mark.parametrize("sleep", [False, True])
def test_no_cache_of_old_weights_is_used(build: Engine, tiny: Callable[..., Any], sleep: bool) -> None:
    """Whether the engine is told (`update_weights`), put to sleep, or the weights just change in place."""
    model = tiny("llama", seed=3)
    engine = build(model)
    first, _ = turn(engine, "first", OPENING, "chat")
    prompt = [*OPENING, *first.token_ids, 8]
    if sleep:
        engine.sleep()
        engine.wake()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    response, prefilled = turn(engine, "second", prompt, "chat")
    assert prefilled == len(prompt)
    assert response.token_ids == turn(build(model), "second", prompt, None)[0].token_ids
    engine.update_weights(None, 1)
    _, prefilled = turn(engine, "third", prompt, "chat")
    assert prefilled == len(prompt)


def test_kept_prefixes_give_way_before_anything_is_preempted(build: Engine) -> None:
    engine = build(cache_tokens=160, max_num_seqs=2)
    for number in range(8):
        turn(engine, str(number), [number + 5] * 20, f"chat {number}")
    _, prefilled = turn(engine, "last", [12] * 22, "chat 7")
    assert prefilled < 10, "the youngest was given up"
    response, _ = turn(engine, "large", [9] * 100, None, max_tokens=40)
    assert response.token_ids == turn(build(), "large", [9] * 100, None, max_tokens=40)[0].token_ids
    assert engine.stats().preemptions == 0


def test_weights_change_between_two_steps(build: Engine, tiny: Callable[..., Any]) -> None:
    """Running sequences go on with the new weights; what starts later uses nothing computed before."""
    model, after = tiny("llama", seed=1), tiny("llama", seed=2)
    engine = build(model)
    early = request("early", 4, 60, temperature=0)
    whole = {(r.request_id, r.sample): r for r in build(model).generate([early])}
    engine.submit([early])
    for _ in range(4):
        engine.poll(0)
    engine.update_weights(after, 7)
    late = Request(
        "late", [*early.prompt_ids, 3], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    )
    before = engine.stats().prefilled_tokens
    engine.submit([late])
    found = drain(engine)
    assert engine.stats().prefilled_tokens - before >= len(late.prompt_ids)
    assert {name: r.policy_version for (name, _), r in found.items()} == {"early": 0, "late": 7}
    (wanted,) = build(after).generate([late])
    assert found["late", 0].token_ids == wanted.token_ids
    tokens, old = found["early", 0].token_ids, whole["early", 0].token_ids
    assert len(tokens) == 60 and tokens != old and tokens[0] == old[0]


def test_a_sleeping_engine_continues_what_was_running(build: Engine) -> None:
    asked = [request("a", 4, 30), request("b", 9, 20)]
    wanted = {(r.request_id, r.sample): r for r in build().generate(asked)}
    engine = build()
    engine.submit(asked)
    engine.poll(0)
    engine.sleep()
    assert engine.stats().kv_blocks_used == 0 and engine.stats().waiting == 4
    engine.wake()
    require_equal(drain(engine), wanted)
