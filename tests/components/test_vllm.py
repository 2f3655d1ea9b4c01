"""vLLM in this process: the rollout contract, weights on both sides, and what must be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from verl.errors import ConfigError, RolloutError, TrainingHalted
from verl.rollout import build_rollout
from verl.rollout.base import Request, SamplingParams
from verl.rollout.source import ModuleWeights

pytest.importorskip("vllm", reason="needs vLLM (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.timeout(600)]

PROMPTS = [[5, 9, 33], [7], [100, 3, 44, 120, 18, 90, 61], [12, 13]]


@pytest.fixture(scope="module")
def model(small_model: Callable[..., Any]) -> Any:
    return small_model()


@pytest.fixture(scope="module")
def engine(model: Any, word_tokenizer: Any, rollout_section: Callable[..., Any]) -> Iterator[Any]:
    section = rollout_section(temperature=0.7)
    section.engine_kwargs.vllm = {"block_size": 64}
    made = build_rollout("vllm", model, word_tokenizer, section)
    yield made
    made.close()


def ask(engine: Any, *requests: Request) -> dict[tuple[str, int], Any]:
    answers: dict[tuple[str, int], Any] = {}
    for response in engine.generate(requests):
        place = (response.request_id, response.sample)
        assert place not in answers, f"{place} was answered twice"
        answers[place] = response
    return answers


def requests(n: int = 1, seed: int = 3, **sampling: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return [Request(f"r{i}", prompt, params, n=n, seed=seed) for i, prompt in enumerate(PROMPTS)]


def shaken(model: Any, seed: int = 1) -> None:
    """Change every weight, as a few optimiser steps would, only more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)


def test_the_arguments_of_the_user_reach_vllm(engine: Any) -> None:
    assert engine.llm.llm_engine.vllm_config.cache_config.block_size == 64
    assert engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == 16


def test_greedy_tokens_are_the_likeliest_ones(engine: Any, model: Any) -> None:
    for request in requests(temperature=0.0, ignore_eos=True):
        (response,) = ask(engine, request).values()
        ids = list(request.prompt_ids)
        for token in response.token_ids:
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert logits[token] >= logits.max() - 1e-4
            ids.append(token)
        assert len(response.token_ids) == 12 and response.finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.4])
def test_log_probs_are_those_of_the_scaled_distribution(
    engine: Any, model: Any, reference: Callable[..., list[float]], temperature: float
) -> None:
    answers = ask(engine, *requests(n=2, temperature=temperature))
    assert len(answers) == 2 * len(PROMPTS)
    for (name, _), response in answers.items():
        expected = reference(model, PROMPTS[int(name[1:])], response.token_ids, temperature)
        assert response.log_probs == pytest.approx(expected, abs=2e-4)


def test_a_sample_is_the_same_alone_and_in_company_and_differs_from_its_siblings(engine: Any) -> None:
    together = ask(engine, *requests(n=4))
    for request in requests(n=4):
        alone = ask(engine, request)
        for place, response in alone.items():
            assert response.token_ids == together[place].token_ids
    assert len({tuple(together["r2", i].token_ids) for i in range(4)}) > 1
    other = ask(engine, *requests(n=4, seed=4))
    assert any(other[place].token_ids != together[place].token_ids for place in together)


def test_sequences_end_where_they_should(engine: Any) -> None:
    free = ask(engine, *requests(ignore_eos=True))["r2", 0].token_ids
    request = Request("r2", PROMPTS[2], SamplingParams(max_tokens=12, ignore_eos=True), seed=3)

    def again(**changes: Any) -> Any:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, **changes)
        return ask(engine, Request("r2", request.prompt_ids, sampling, seed=3))["r2", 0]

    first = free.index(free[4])
    by_id = again(stop_token_ids=(free[4],))
    assert by_id.token_ids == free[: first + 1] and by_id.finish_reason == "stop"
    by_text = again(stop=(f"w{free[4]} ",))
    assert by_text.token_ids == free[: first + 1] and by_text.finish_reason == "stop"
    assert len(by_text.log_probs) == len(by_text.token_ids)


def test_a_resumed_sample_goes_on_after_what_it_has(engine: Any, model: Any, reference: Any) -> None:
    done = [[20, 21, 22], []]
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    answers = ask(engine, Request("r", [5, 9], sampling, n=2, partial=tuple(done)))
    for number, part in enumerate(done):
        response = answers["r", number]
        assert len(response.token_ids) == 10 - len(part)
        assert response.log_probs == pytest.approx(
            reference(model, [5, 9, *part], response.token_ids), abs=2e-4
        )


def test_abort_ends_what_runs_and_keeps_what_is_there(
    engine: Any, model: Any, reference: Callable[..., list[float]]
) -> None:
    sampling = {"max_tokens": 100, "ignore_eos": True}
    short = Request("short", [4], SamplingParams(max_tokens=3, ignore_eos=True))
    long = [Request(f"long{i}", prompt, SamplingParams(**sampling)) for i, prompt in enumerate(PROMPTS)]
    answers = {}
    for response in engine.generate([short, *long]):
        answers[response.request_id] = response
        if response.request_id == "short":
            engine.abort([r.request_id for r in long[:2]])
        elif response.request_id == "long1":
            engine.abort()
    assert {r.finish_reason for r in answers.values()} == {"length", "abort"}
    assert len(answers) == 5 and all(0 < len(answers[r.request_id].token_ids) < 100 for r in long)
    for request in long:
        response = answers[request.request_id]
        expected = reference(model, list(request.prompt_ids), response.token_ids)
        assert response.log_probs == pytest.approx(expected, abs=2e-4)
    assert len(ask(engine, *requests())) == len(PROMPTS), "the engine works on afterwards"


def test_samples_are_reported_once_at_their_end_unless_stop_strings_are_looked_for(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    step = engine.llm.llm_engine.step

    def counting() -> Any:
        outputs = step()
        reported.extend(output.request_id for output in outputs)
        return outputs

    monkeypatch.setattr(engine.llm.llm_engine, "step", counting)
    whole = ask(engine, *requests(ignore_eos=True))
    assert sorted(reported) == sorted(f"r{i}/0" for i in range(len(PROMPTS)))
    reported.clear()
    pieces = ask(engine, *requests(ignore_eos=True, stop=("never",)))
    assert len(reported) == 12 * len(PROMPTS)
    for place, response in whole.items():
        assert response.token_ids == pieces[place].token_ids and len(response.token_ids) == 12
        assert response.log_probs == pytest.approx(pieces[place].log_probs, abs=1e-5)


def test_without_seeds_of_their_own_samples_still_differ(
    engine: Any, model: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.config, "per_request_seed", False)
    answers = ask(engine, Request("r", PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True), n=4))
    assert len({tuple(response.token_ids) for response in answers.values()}) > 1
    for response in answers.values():
        assert response.log_probs == pytest.approx(reference(model, PROMPTS[0], response.token_ids), abs=2e-4)


def test_a_loop_left_early_leaves_nothing_running(engine: Any) -> None:
    stream = engine.generate(requests(max_tokens=60, ignore_eos=True))
    stream.close()
    stream = engine.generate(requests(max_tokens=5, ignore_eos=True))
    next(stream)
    stream.close()
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_what_cannot_be_served_is_said_before_anything_runs(engine: Any) -> None:
    with pytest.raises(RolloutError, match="may reach 129 tokens"):
        engine.generate([Request("a", [5, 6, 7], SamplingParams(max_tokens=126))])
    with pytest.raises(RolloutError, match="vocabulary of 160"):
        engine.generate([Request("a", [160])])


def test_new_weights_are_the_ones_generated_from(
    engine: Any, model: Any, reference: Callable[..., list[float]]
) -> None:
    before = ask(engine, *requests(n=2))
    shaken(model)
    engine.update_weights(ModuleWeights(model), 5)
    after = ask(engine, *requests(n=2))
    assert {response.policy_version for response in after.values()} == {5}
    assert any(after[place].token_ids != before[place].token_ids for place in after)
    for (name, _), response in after.items():
        expected = reference(model, PROMPTS[int(name[1:])], response.token_ids)
        assert response.log_probs == pytest.approx(expected, abs=2e-4)


def test_a_value_changed_on_the_way_is_caught(engine: Any, model: Any, monkeypatch: Any) -> None:
    deliver = engine.deliver

    def corrupted(pairs: Any) -> Any:
        for name, tensor in pairs:
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor = tensor.clone()
                tensor[3, 5] += 1e-3
            yield name, tensor

    monkeypatch.setattr(engine, "deliver", lambda pairs: deliver(corrupted(pairs)))
    with pytest.raises(
        TrainingHalted, match=r"1 of \d+ tensors differ.*\n  model.layers.1.mlp.up_proj.weight: sent"
    ):
        engine.update_weights(ModuleWeights(model), 6)
    monkeypatch.undo()
    engine.update_weights(ModuleWeights(model), 7)


def test_a_weight_left_out_is_caught(engine: Any, model: Any, monkeypatch: Any) -> None:
    deliver = engine.deliver
    part = "model.layers.0.self_attn.o_proj.weight"
    monkeypatch.setattr(engine, "deliver", lambda pairs: deliver((n, t) for n, t in pairs if n != part))
    with pytest.raises(TrainingHalted, match="received nothing"):
        engine.update_weights(ModuleWeights(model), 8)
    monkeypatch.undo()
    engine.update_weights(ModuleWeights(model), 9)


def test_weights_that_arrived_but_are_not_used_are_caught(
    engine: Any, model: Any, small_model: Callable[..., Any]
) -> None:
    """The trainer's and the engine's weights differ without any transfer to blame: only log-probs can tell."""
    engine.source = ModuleWeights(small_model(seed=4))
    with pytest.raises(TrainingHalted, match="log-probs of a fixed prompt differ by"):
        engine.prove()
    engine.update_weights(ModuleWeights(model), 10)


def test_requests_arrive_while_others_run_and_weights_change_between_steps(
    engine: Any, model: Any, reference: Any
) -> None:
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit([Request("early", [5, 9, 33], long)])
    assert engine.poll(0) == [] and engine.stats().waiting == 0 and engine.stats().running == 1
    engine.submit([Request("late", [7], SamplingParams(max_tokens=4, ignore_eos=True))])
    (late,) = engine.poll()
    assert late.request_id == "late" and late.policy_version == engine.version
    before = engine.version
    shaken(model, seed=2)
    engine.update_weights(ModuleWeights(model), 11)
    (early,) = engine.poll()
    assert early.request_id == "early" and len(early.token_ids) == 40 and early.policy_version == before
    # Its last tokens were drawn, and its cache computed anew, with the new weights.
    expected = reference(model, [5, 9, 33], early.token_ids)
    assert early.log_probs[-10:] == pytest.approx(expected[-10:], abs=2e-4)
    assert early.log_probs[0] != pytest.approx(expected[0], abs=2e-4)
    assert engine.poll() == [] and engine.stats().running == 0


def test_sleeping_on_the_cpu_changes_nothing(engine: Any) -> None:
    before = ask(engine, *requests())
    engine.sleep()
    engine.wake()
    after = ask(engine, *requests())
    assert [before[p].token_ids for p in before] == [after[p].token_ids for p in before]


def test_half_precision_on_the_cpu_is_refused(model: Any, rollout_section: Callable[..., Any]) -> None:
    for dtype in ("bfloat16", "fp8"):
        with pytest.raises(ConfigError, match=f"rollout.dtype={dtype} needs a GPU"):
            build_rollout("vllm", model, None, rollout_section(dtype=dtype))


def test_an_argument_vllm_does_not_have_is_named(model: Any, rollout_section: Callable[..., Any]) -> None:
    section = rollout_section()
    section.engine_kwargs.vllm = {"no_such_argument": 1}
    with pytest.raises(RolloutError, match="no_such_argument"):
        build_rollout("vllm", model, None, section)
