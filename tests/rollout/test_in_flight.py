"""Weights that arrive while samples run: which weights drew each token, and with which keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from verl.rollout import Request, Response, SamplingParams
from verl.rollout.native import Limits, NativeRollout
from verl.rollout.sequence import Sequence

Engine = Callable[..., NativeRollout]
PROMPT = [50 + i for i in range(20)]
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)


@pytest.fixture(params=[False, True], ids=["cpu path", "device path"])
def build(request: Any) -> Engine:
    def engine(model: Any, **limits: Any) -> NativeRollout:
        settings = Limits(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **limits})
        return NativeRollout(model, None, settings, on_device=request.param, verify=False)

    return engine


@pytest.fixture
def models(tiny: Callable[..., Any]) -> tuple[Any, Any]:
    return tiny("llama", seed=1), tiny("llama", seed=2)


def answers(engine: NativeRollout, requests: list[Request] | None = None) -> dict[tuple[str, int], Response]:
    engine.submit(requests or [])
    found: dict[tuple[str, int], Response] = {}
    while responses := engine.poll():
        found |= {(response.request_id, response.sample): response for response in responses}
    return found


def step(engine: NativeRollout, times: int) -> None:
    for _ in range(times):
        assert engine.poll(0) == []


def forced(before: Any, after: Any, prompt: list[int], tokens: list[int], change: int) -> torch.Tensor:
    """Log-probs of greedy decoding of one token after the other, with the cache kept when the weights change."""
    cache, ids, rows = DynamicCache(), prompt, []
    with torch.no_grad():
        for at, token in enumerate(tokens):
            model = before if at < change else after
            logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
            rows.append(logits.log_softmax(-1))
            ids = [token]
    return torch.stack(rows)


def test_running_samples_go_on_with_the_keys_and_values_they_have(
    build: Engine, models: tuple[Any, Any]
) -> None:
    before, after = models
    engine = build(before)
    engine.submit([Request("a", PROMPT, GREEDY), Request("b", PROMPT[:7], GREEDY, partial=([8, 9],))])
    step(engine, 4)
    engine.update_weights(after, 7)
    found = answers(engine)
    for name, prompt in (("a", PROMPT), ("b", [*PROMPT[:7], 8, 9])):
        response = found[name, 0]
        ((change, version),) = response.version_changes
        assert (response.policy_version, version) == (0, 7) and 0 < change < len(response.token_ids)
        assert response.versions == [0] * change + [7] * (len(response.token_ids) - change)
        rows = forced(before, after, prompt, response.token_ids, change)
        assert rows.argmax(-1).tolist() == response.token_ids
        drawn = rows.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
        assert response.log_probs == pytest.approx(drawn.tolist(), abs=1e-4)


def test_recomputed_samples_go_on_as_if_resumed_with_the_new_weights(
    build: Engine, models: tuple[Any, Any]
) -> None:
    before, after = models
    request = Request("a", PROMPT, LONG, n=3, seed=4)
    old = answers(build(before), [request])
    engine = build(before, recompute_kv_cache=True)
    engine.submit([request])
    step(engine, 4)
    engine.update_weights(after, 7)
    found = answers(engine)
    for sample in range(3):
        response = found["a", sample]
        ((change, version),) = response.version_changes
        assert version == 7 and 0 < change < 40 and len(response.token_ids) == 40
        assert response.token_ids[:change] == old["a", sample].token_ids[:change]
        done = tuple(found["a", i].token_ids[:change] for i in range(3))
        resumed = answers(build(after), [Request("a", PROMPT, LONG, n=3, seed=4, partial=done)])
        assert response.token_ids[change:] == resumed["a", sample].token_ids
        assert response.log_probs[change:] == pytest.approx(resumed["a", sample].log_probs, abs=1e-4)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("recompute", [False, True])
def test_no_other_request_uses_what_the_old_weights_computed(
    build: Engine, models: tuple[Any, Any], recompute: bool
) -> None:
    before, after = models
    engine = build(before, recompute_kv_cache=recompute)
    chat = Request("chat", PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), prefix_id="c")
    engine.submit([Request("early", PROMPT, LONG, n=2), chat])
    first = engine.poll()
    assert [response.request_id for response in first] == ["chat"]
    engine.update_weights(after, 1)
    # Submitted while "early" runs on its old blocks, of which none may be found again when it has finished.
    turn = [*PROMPT, *first[0].token_ids, 9]
    late = [Request("late", PROMPT, GREEDY, n=2), Request("turn", turn, GREEDY, prefix_id="c")]
    found = answers(engine, late) | answers(engine, [Request("last", [*PROMPT, 3], GREEDY)])
    fresh = answers(build(after), late) | answers(build(after), [Request("last", [*PROMPT, 3], GREEDY)])
    for key, wanted in fresh.items():
        assert found[key].token_ids == wanted.token_ids, key
        assert found[key].log_probs == pytest.approx(wanted.log_probs, abs=1e-4)
        assert found[key].versions == [1] * 40


def test_what_has_no_token_yet_has_only_the_newest_version(build: Engine, models: tuple[Any, Any]) -> None:
    """Waiting for a place, or not even taken over from `submit`; and two updates leave one change."""
    before, after = models
    engine = build(before, max_num_seqs=1)
    engine.submit([Request("runs", PROMPT[:3], LONG), Request("waits", PROMPT, LONG, n=2)])
    step(engine, 3)
    engine.submit([Request("new", PROMPT[:3], LONG)])
    engine.update_weights(after, 1)
    engine.update_weights(before, 2)
    step(engine, 2)
    engine.update_weights(after, 3)
    engine.abort(["runs"])
    found = answers(engine)
    running = found.pop(("runs", 0))
    assert [version for _, version in running.version_changes] == [2], "3 drew nothing"
    assert set(running.versions) == {0, 2} and len(running.versions) == len(running.token_ids)
    assert {tuple(set(response.versions)) for response in found.values()} == {(3,)}


def test_updates_one_after_the_other_are_all_noted(build: Engine, models: tuple[Any, Any]) -> None:
    """Also for samples that are preempted in between, when the cache is full."""
    engine = build(models[0], cache_tokens=160, max_num_seqs=4)
    engine.submit([Request(f"r{i}", PROMPT, LONG, n=2) for i in range(3)])
    found: dict[tuple[str, int], Response] = {}
    version = 0
    while True:
        responses = engine.poll(0)
        found |= {(response.request_id, response.sample): response for response in responses}
        if len(found) == 6:
            break
        version += 1
        engine.update_weights(models[version % 2], version)
    assert engine.stats().preemptions > 0 or not engine.on_device  # pages on the CPU are never short
    for response in found.values():
        versions = response.versions
        assert len(versions) == 40 and versions == sorted(versions) and len(set(versions)) > 3


def test_a_key_of_its_own_gives_a_request_the_draws_of_another(
    build: Engine, models: tuple[Any, Any]
) -> None:
    (plain,) = answers(build(models[0]), [Request("a", PROMPT, LONG, seed=3)]).values()
    (keyed,) = answers(build(models[0]), [Request("val/a", PROMPT, LONG, seed=3, key="a")]).values()
    (other,) = answers(build(models[0]), [Request("val/a", PROMPT, LONG, seed=3)]).values()
    assert keyed.token_ids == plain.token_ids != other.token_ids


def test_a_version_that_drew_nothing_leaves_no_change() -> None:
    sequence = Sequence(Request("a", PROMPT, LONG), 0, 1)

    def change(drawn: int, version: int) -> None:
        sequence.on_device = drawn
        sequence.set_version(version)

    change(0, 2)
    change(4, 3)
    change(4, 2)
    assert (sequence.first_version, sequence.version_changes) == (2, [])
    change(4, 5)
    change(9, 5)
    change(9, 6)
    assert sequence.version_changes == [(4, 5), (9, 6)]
    sequence.tokens += range(9)
    assert sequence.response("stop").version_changes == [(4, 5)]
