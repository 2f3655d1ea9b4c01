"""Weights that reach vLLM while samples run: in this process, in other processes, in a server, and as adapters."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from verl.rollout import build_rollout
from verl.rollout.base import Request, Response, SamplingParams
from verl.rollout.source import ModuleWeights

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

BLOCK = 32
SHARED = [3 + i % 150 for i in range(70)]
PROMPTS = {"a": [*SHARED, 7], "b": [*SHARED, 90, 91], "c": [5, 9, 33]}
SAMPLING = SamplingParams(max_tokens=48, ignore_eos=True)

Built = tuple[Any, Any]
"""A model and an engine that generates from it."""


def built(model: Any, section: Any) -> Iterator[Built]:
    section.max_model_len, section.engine_kwargs.vllm = 160, {"block_size": BLOCK}
    engine = build_rollout("vllm", model, None, section)
    yield model, engine
    engine.close()


@pytest.fixture(scope="module")
def here(small_model: Callable[..., Any], rollout_section: Callable[..., Any]) -> Iterator[Built]:
    yield from built(small_model(), rollout_section())


@pytest.fixture(scope="module")
def server(small_model: Callable[..., Any], rollout_section: Callable[..., Any]) -> Iterator[Built]:
    yield from built(small_model(), rollout_section(mode="server"))


def shaken(model: Any, wanted: str = "") -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if wanted in name:
                weight.add_(torch.randn_like(weight) * 0.05)


def requests() -> list[Request]:
    return [Request(name, prompt, SAMPLING, n=2, seed=4) for name, prompt in PROMPTS.items()]


def start(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit the requests; each sample has some of its tokens, and no more are read before the next update."""
    if engine.config.mode == "inprocess":
        engine.submit(requests())
        for _ in range(6):
            assert engine.poll(0) == []
        return
    stream, started, read = type(engine).stream, set(), threading.Semaphore(0)

    async def until_the_update(sample: Any) -> AsyncIterator[Any]:
        again = sample.name in started
        started.add(sample.name)
        async with contextlib.aclosing(stream(engine, sample)) as pieces:
            async for piece in pieces:
                try:
                    yield piece  # the server joins tokens that wait to be read: it may be the only one
                finally:
                    read.release()
                while not again and not engine._updating:
                    await asyncio.sleep(0.01)
                if not again:
                    return  # however fast the server: the rest is not read

    with monkeypatch.context() as patch:
        patch.setattr(engine, "stream", until_the_update)
        engine.submit(requests())
        for _ in range(2 * len(PROMPTS)):
            assert read.acquire(timeout=300)


def drain(engine: Any) -> dict[tuple[str, int], Response]:
    found: dict[tuple[str, int], Response] = {}
    while responses := engine.poll():
        found |= {(response.request_id, response.sample): response for response in responses}
    return found


def after_the_change(
    old: Any, new: Any, prompt: list[int], tokens: list[int], change: int, kept: int
) -> list[float]:
    """Log-probs of the tokens from `change` on, with the keys and values of the first `kept` tokens by `old`."""
    from transformers import DynamicCache

    ids, cache = torch.tensor([[*prompt, *tokens]]), DynamicCache()
    with torch.no_grad():
        if kept:
            old(ids[:, :kept], past_key_values=cache, use_cache=True)
        logits = new(ids[:, kept:], past_key_values=cache, use_cache=True).logits[0].double()
    rows = logits.log_softmax(-1)[len(prompt) + change - 1 - kept : -1]
    return [float(row[token]) for row, token in zip(rows, tokens[change:], strict=True)]


def check(found: dict[tuple[str, int], Response], old: Any, new: Any, keeps: bool, version: int) -> int:
    """That every token was drawn with the weights of its version; how many samples had kept blocks."""
    with_kept = 0
    for (name, _), response in found.items():
        prompt, tokens = PROMPTS[name], response.token_ids
        assert len(tokens) == len(response.log_probs) == 48
        # A process of its own generates ahead of what is read: a sample may be complete when the update comes.
        ((change, newest),) = response.version_changes or [(48, version)]
        assert response.versions == [version - 1] * change + [version] * (48 - change) and newest == version
        # The newest token was drawn and not computed; what does not fill a block is computed again.
        kept = (len(prompt) + change - 1) // BLOCK * BLOCK if keeps else 0
        with_kept += kept > 0 and change < 48
        early = after_the_change(old, old, prompt, tokens[:change], 0, 0)
        late = after_the_change(old, new, prompt, tokens, change, kept) if change < 48 else []
        assert response.log_probs == pytest.approx([*early, *late], abs=3e-4)
    return with_kept


def require_new(engine: Any, model: Any, reference: Callable[..., list[float]]) -> None:
    """Prompts that were cached before the update are answered with the new weights alone."""
    answers = list(engine.generate(requests()))
    assert {response.policy_version for response in answers} == {engine.version}
    for response in answers:
        assert response.version_changes == []
        expected = reference(model, PROMPTS[response.request_id], response.token_ids)
        assert response.log_probs == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_continue_in_this_process(
    here: Built, reference: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    model, engine = here
    monkeypatch.setattr(engine.config, "recompute_kv_cache", recompute)
    old, version = copy.deepcopy(model), engine.version + 1
    start(engine, monkeypatch)
    shaken(model)
    engine.update_weights(ModuleWeights(model), version)
    engine.submit([Request("late", PROMPTS["a"], SAMPLING)])
    found = drain(engine)
    late = found.pop(("late", 0))
    assert late.versions == [version] * 48
    assert late.log_probs == pytest.approx(reference(model, PROMPTS["a"], late.token_ids), abs=3e-4)
    assert check(found, old, model, not recompute, version) == (0 if recompute else 4)
    require_new(engine, model, reference)


def test_a_sample_without_a_token_has_only_the_new_version(here: Built) -> None:
    model, engine = here
    engine.submit(requests())
    engine.update_weights(ModuleWeights(model), engine.version + 1)
    assert {tuple(set(response.versions)) for response in drain(engine).values()} == {(engine.version,)}


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_continue_in_a_server(
    server: Built, reference: Callable[..., list[float]], monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    model, engine = server
    monkeypatch.setattr(engine.config, "recompute_kv_cache", recompute)
    old, version = copy.deepcopy(model), engine.version + 1
    start(engine, monkeypatch)
    shaken(model)
    engine.update_weights(ModuleWeights(model), version)
    assert (check(drain(engine), old, model, not recompute, version) == 0) == recompute
    require_new(engine, model, reference)


def test_samples_continue_in_other_processes(
    small_model: Callable[..., Any],
    rollout_section: Callable[..., Any],
    reference: Callable[..., list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's processes generate ahead of what has been read from them."""
    model = small_model(num_key_value_heads=2)
    for _, engine in built(model, rollout_section(tensor_model_parallel_size=2)):
        old = copy.deepcopy(model)
        start(engine, monkeypatch)
        shaken(model)
        engine.update_weights(ModuleWeights(model), 1)
        assert check(drain(engine), old, model, True, 1) > 0
        require_new(engine, model, reference)


@pytest.mark.parametrize("mode", ["inprocess", "server"])
def test_samples_continue_with_a_new_adapter(
    small_model: Callable[..., Any],
    rollout_section: Callable[..., Any],
    reference: Callable[..., list[float]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    from verl.models.lora import add_lora

    model = small_model()
    add_lora(model, rank=4, alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    for _, engine in built(model, rollout_section(mode=mode)):
        shaken(model, "lora_")
        engine.update_weights(ModuleWeights(model), 1)
        for version in (2, 3, 4):
            old = copy.deepcopy(model)
            start(engine, monkeypatch)
            shaken(model, "lora_")
            engine.update_weights(ModuleWeights(model), version)
            check(drain(engine), old, model, False, version)
            require_new(engine, model, reference)
