"""The reference engine against a loop without cache, and its promises about requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from verl.errors import ConfigError, MissingPackage, RolloutError
from verl.rollout import Request, SamplingParams, build_rollout, register_rollout
from verl.rollout.hf import HFRollout
from verl.rollout.native import NativeRollout
from verl.rollout.source import ModuleWeights

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def by_sample(responses: Any) -> dict[tuple[str, int], Any]:
    responses = list(responses)
    table = {(response.request_id, response.sample): response for response in responses}
    assert len(table) == len(responses), "a sample was answered twice"
    return table


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "gemma2", "phi", "qwen3_moe"])
def test_greedy_equals_the_loop_without_cache(
    name: str, tiny: Callable[..., Any], prompts: list[list[int]], greedy_reference: Callable[..., Any]
) -> None:
    model = tiny(name)
    engine = HFRollout(model, None)
    answers = by_sample(engine.generate(Request(str(i), p, GREEDY) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        tokens, log_probs = greedy_reference(model, prompt, 12)
        assert answers[str(i), 0].token_ids == tokens
        assert answers[str(i), 0].log_probs == pytest.approx(log_probs, abs=1e-5)
        assert answers[str(i), 0].finish_reason == "length"


def test_seeds_reproduce_in_any_company(tiny: Callable[..., Any], prompts: list[list[int]]) -> None:
    model = tiny("llama")
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    requests = [Request(str(i), p, sampling, n=3, seed=7) for i, p in enumerate(prompts)]
    together = by_sample(HFRollout(model, None).generate(requests))
    assert len(together) == 15
    assert len({tuple(r.token_ids) for r in together.values()}) == 15
    alone = by_sample(HFRollout(model, None).generate([requests[2]]))
    for key, response in alone.items():
        assert response.token_ids == together[key].token_ids
    other_seed = by_sample(HFRollout(model, None).generate([Request("2", prompts[2], sampling, n=3, seed=8)]))
    assert all(other_seed[key].token_ids != alone[key].token_ids for key in alone)


def test_resumed_partial_tokens_continue_exactly(tiny: Callable[..., Any], prompts: list[list[int]]) -> None:
    engine = HFRollout(tiny("qwen3"), None)
    sampling = SamplingParams(max_tokens=14, ignore_eos=True)
    whole = by_sample(engine.generate([Request("a", prompts[3], sampling, n=2, seed=1)]))
    partial = (whole["a", 0].token_ids[:5], whole["a", 1].token_ids[:9])
    rest = by_sample(engine.generate([Request("a", prompts[3], sampling, n=2, seed=1, partial=partial)]))
    for index in (0, 1):
        assert [*partial[index], *rest["a", index].token_ids] == whole["a", index].token_ids
        assert rest["a", index].log_probs == pytest.approx(
            whole["a", index].log_probs[len(partial[index]) :], abs=1e-5
        )


def test_stop_tokens_end_of_sequence_and_length(tiny: Callable[..., Any], prompts: list[list[int]]) -> None:
    model = tiny("llama")
    engine = HFRollout(model, None)
    free = by_sample(engine.generate([Request("a", prompts[1], GREEDY)]))["a", 0].token_ids
    stop = free[4]
    first = free.index(stop)
    ended = by_sample(
        engine.generate(
            [Request("a", prompts[1], SamplingParams(temperature=0, stop_token_ids=(stop,), ignore_eos=True))]
        )
    )["a", 0]
    assert ended.token_ids == free[: first + 1] and ended.finish_reason == "stop"
    model.generation_config.eos_token_id = [2, stop]
    try:
        eos = by_sample(engine.generate([Request("a", prompts[1], SamplingParams(temperature=0))]))["a", 0]
    finally:
        model.generation_config.eos_token_id = 2
    assert eos.token_ids == free[: first + 1] and eos.finish_reason == "stop"


class SpelledTokens:
    """A tokenizer of one letter per id, enough to read stop strings."""

    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(48 + token) for token in ids)


def test_stop_strings(tiny: Callable[..., Any], prompts: list[list[int]]) -> None:
    engine = HFRollout(tiny("llama"), SpelledTokens())
    free = by_sample(engine.generate([Request("a", prompts[1], GREEDY)]))["a", 0].token_ids
    text = SpelledTokens().decode(free[2:4])
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=(text, "never seen"))
    ended = by_sample(engine.generate([Request("a", prompts[1], params)]))["a", 0]
    assert ended.finish_reason == "stop" and ended.token_ids == free[:4]
    never = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=("never seen",))
    assert by_sample(engine.generate([Request("a", prompts[1], never)]))["a", 0].token_ids == free
    with pytest.raises(RolloutError, match="no tokenizer"):
        HFRollout(tiny("llama"), None).generate([Request("a", prompts[1], never)])


BAD = {
    "empty prompt": (Request("a", []), "prompt is empty"),
    "n zero": (Request("a", [1], n=0), "n is 0"),
    "negative temperature": (Request("a", [1], SamplingParams(temperature=-1)), "temperature is -1"),
    "nan temperature": (Request("a", [1], SamplingParams(temperature=float("nan"))), "temperature is nan"),
    "top_p zero": (Request("a", [1], SamplingParams(top_p=0)), "top_p is 0"),
    "min_p above one": (Request("a", [1], SamplingParams(min_p=1.5)), "min_p is 1.5"),
    "penalty zero": (Request("a", [1], SamplingParams(repetition_penalty=0)), "repetition_penalty is 0"),
    "no tokens": (Request("a", [1], SamplingParams(max_tokens=0)), "max_tokens is 0"),
    "unknown token": (Request("a", [1, 97]), "token id 97"),
    "negative token": (Request("a", [-1]), "token id -1"),
    "empty stop": (Request("a", [1], SamplingParams(stop=("",))), "stop string is empty"),
    "partial count": (Request("a", [1], n=2, partial=([1],)), "partial has 1 samples"),
    "partial full": (Request("a", [1], SamplingParams(max_tokens=2), partial=([1, 2],)), "2 tokens already"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("engine_name", ["hf", "native"])
def test_bad_requests_are_refused_before_anything_runs(
    engine_name: str, case: str, tiny: Callable[..., Any]
) -> None:
    request, message = BAD[case]
    engine = build_rollout(engine_name, tiny("llama"), SpelledTokens(), None)
    with pytest.raises(RolloutError, match=message):
        engine.generate([Request("fine", [1, 2]), request])


def test_the_module_is_left_as_it_was(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    model.train()
    model.model.layers[0].eval()
    before = model.config._attn_implementation
    held: list[str] = []

    class Engine(ModuleWeights):
        @contextmanager
        def module(self) -> Any:
            held.append("in")
            yield model
            held.append("out")

    model.set_attn_implementation("eager")
    answers = HFRollout(Engine(model), None).generate([Request("a", [1, 2], SamplingParams(max_tokens=2))])
    next(answers)
    assert held[-1] == "out" and held.count("in") == held.count("out")
    assert model.config._attn_implementation == "eager"
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert torch.is_grad_enabled()
    model.eval()
    model.set_attn_implementation(before)


def test_requests_submitted_while_a_batch_runs_wait_and_can_be_aborted(tiny: Callable[..., Any]) -> None:
    engine = HFRollout(tiny("llama"), None)
    first = Request("first", [5, 6], SamplingParams(max_tokens=3, ignore_eos=True), n=2)
    engine.submit([first])
    found = engine.poll()
    engine.submit([Request("second", [7], GREEDY), Request("third", [8], GREEDY, n=2)])
    with pytest.raises(RolloutError, match="token id 97"):
        engine.submit([Request("fourth", [97], GREEDY)])
    assert (engine.stats().running, engine.stats().waiting) == (1, 3)
    engine.abort(["third"])
    while responses := engine.poll():
        found += responses
    reasons = {(r.request_id, r.sample): (r.finish_reason, len(r.token_ids)) for r in found}
    assert reasons == {
        ("first", 0): ("length", 3),
        ("first", 1): ("length", 3),
        ("second", 0): ("length", 12),
        ("third", 0): ("abort", 0),
        ("third", 1): ("abort", 0),
    }
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 18)


def test_version_follows_update_weights(tiny: Callable[..., Any]) -> None:
    engine = HFRollout(tiny("llama"), None)
    engine.update_weights(None, 7)
    assert next(engine.generate([Request("a", [1], SamplingParams(max_tokens=1))])).policy_version == 7


def test_engines_by_name(tiny: Callable[..., Any]) -> None:
    import verl.rollout as room

    model = tiny("llama")
    assert isinstance(build_rollout("hf", model, None, None), HFRollout)
    with pytest.raises(ConfigError, match=r"known engines: .*hf"):
        build_rollout("nonesuch", model, None, None)
    for name in ("vllm", "sglang"):  # neither package is part of this environment
        with pytest.raises((ConfigError, MissingPackage), match=f"rollout.name={name}"):
            build_rollout(name, model, None, None)
    try:
        register_rollout("mine")(lambda source, tokenizer, config: HFRollout(source, tokenizer))
        assert isinstance(build_rollout("mine", model, None, None), HFRollout)
    finally:
        del room._registry["mine"]


@pytest.mark.parametrize("engine", [NativeRollout, HFRollout])
def test_a_model_with_broken_weights_is_noticed(engine: Any, tiny: Any) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(RolloutError, match="NaN or infinite"):
        list(engine(model, None).generate([Request("a", [3, 4, 5], SamplingParams(max_tokens=4))]))


def test_the_plain_engine_goes_on_with_the_rows_that_are_left(tiny: Any) -> None:
    """Greedy and drawn rows of different lengths: half of them end early, the others keep their settings."""
    model = tiny("llama")
    requests = [
        Request(
            str(at),
            [3 + at, 9, 4],
            SamplingParams(
                max_tokens=3 if at % 3 else 12,
                temperature=0.0 if at % 2 else 0.8,
                top_k=5 if at < 4 else -1,
                repetition_penalty=1.3 if at < 2 else 1.0,
                raw_log_probs=at == 4,
                ignore_eos=True,
            ),
            seed=2,
        )
        for at in range(8)
    ]
    together = {r.request_id: r for r in HFRollout(model, None).generate(requests)}
    for request in requests:
        (alone,) = HFRollout(model, None).generate([request])
        got = together[request.request_id]
        assert len(got.token_ids) == request.sampling.max_tokens
        assert got.token_ids == alone.token_ids
        assert got.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_both_engines_mind_what_a_response_has_said_already(tiny: Any) -> None:
    """The penalty reads prompt and response: an engine that forgot one of them would draw other tokens."""
    model = tiny("llama")
    requests = [
        Request(
            str(at),
            [3 + at, 9, 4, 40 + at],
            SamplingParams(max_tokens=16, temperature=temperature, repetition_penalty=3.0, ignore_eos=True),
            seed=5,
        )
        for at, temperature in enumerate((0.0, 0.0, 0.9, 0.9))
    ]
    plain = {r.request_id: r for r in HFRollout(model, None).generate(requests)}
    ours = {r.request_id: r for r in NativeRollout(model, None).generate(requests)}
    for request in requests:
        got = plain[request.request_id]
        assert got.token_ids == ours[request.request_id].token_ids
        # By hand, from whole logits: seen tokens are penalised, greedy rows take the best of what is left.
        if request.sampling.temperature == 0:
            known = list(request.prompt_ids)
            for token in got.token_ids:
                with torch.no_grad():
                    logits = model(torch.tensor([known]), use_cache=False).logits[0, -1]
                for seen in set(known):
                    logits[seen] = logits[seen] / 3 if logits[seen] > 0 else logits[seen] * 3
                assert int(logits.argmax()) == token
                known.append(token)
