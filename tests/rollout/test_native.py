"""The native engine on the CPU against transformers, and its promises: seeds, preemption, resume, abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl.errors import ConfigError, RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.native import Limits, NativeRollout

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
NAMES = [
    "llama",
    "llama_tied",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi",
    "phi3",
    "qwen3_moe",
    "gpt_oss",
]


def by_sample(responses: Any) -> dict[tuple[str, int], Any]:
    responses = list(responses)
    table = {(response.request_id, response.sample): response for response in responses}
    assert len(table) == len(responses), "a sample was answered twice"
    return table


@pytest.fixture(params=["cpu path", "device path"])
def native(request: Any) -> Callable[..., NativeRollout]:
    """Makes an engine; the path for devices runs on the CPU with the reference operations."""

    def make(source: Any, tokenizer: Any = None, **limits: Any) -> NativeRollout:
        return NativeRollout(source, tokenizer, small(**limits), on_device=request.param == "device path")

    return make


def small(**changes: Any) -> Limits:
    return Limits(**{"max_num_seqs": 64, "max_num_batched_tokens": 512, **changes})


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "qwen3") else pytest.param(name, marks=pytest.mark.slow(seconds=2))
        for name in NAMES
    ],
)
def test_greedy_equals_the_loop_without_cache(
    native: Callable[..., NativeRollout],
    name: str,
    tiny: Callable[..., Any],
    prompts: list[list[int]],
    greedy_reference: Callable[..., Any],
) -> None:
    model = tiny(name)
    engine = native(model, max_num_batched_tokens=19, max_num_seqs=3)
    answers = by_sample(engine.generate(Request(str(i), p, GREEDY) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        tokens, log_probs = greedy_reference(model, prompt, 12)
        assert answers[str(i), 0].token_ids == tokens
        assert answers[str(i), 0].log_probs == pytest.approx(log_probs, abs=1e-5)
        assert answers[str(i), 0].finish_reason == "length"


def wide_requests(prompts: list[list[int]], n: int = 4, seed: int = 3) -> list[Request]:
    """Prompts with a common opening, several samples each, of different lengths."""
    opening = [50 + i for i in range(20)]
    return [
        Request(f"r{i}", opening + p, SamplingParams(max_tokens=6 + 5 * i, ignore_eos=True), n=n, seed=seed)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch_the_chunks_or_the_cache(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    model = tiny("llama")
    requests = wide_requests(prompts)
    roomy = by_sample(native(model).generate(requests))
    assert len(roomy) == 20
    for limits in (
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"cache_tokens": 80 * 3},
        {"cache_tokens": 80, "max_num_seqs": 2},
    ):
        tight = by_sample(native(model, **limits).generate(requests))
        assert {key: r.token_ids for key, r in tight.items()} == {
            key: r.token_ids for key, r in roomy.items()
        }
        for key, response in tight.items():
            assert response.log_probs == pytest.approx(roomy[key].log_probs, abs=2e-5)
    for request in requests:
        alone = by_sample(native(model).generate([request]))
        assert all(response.token_ids == roomy[key].token_ids for key, response in alone.items())


def test_a_full_cache_preempts_and_loses_nothing(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    model = tiny("llama")
    requests = wide_requests(prompts, n=6)
    engine = native(model, cache_tokens=80 * 4)
    tight = by_sample(engine.generate(requests))
    assert engine.stats().preemptions > 0
    roomy = by_sample(native(model).generate(requests))
    assert {key: r.token_ids for key, r in tight.items()} == {key: r.token_ids for key, r in roomy.items()}


def test_log_probs_equal_those_recomputed_by_the_model(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    model = tiny("qwen3")
    sampling = SamplingParams(max_tokens=20, temperature=0.7, ignore_eos=True)
    requests = [Request(str(i), p, sampling, n=3) for i, p in enumerate(prompts)]
    for response in list(native(model).generate(requests)):
        ids = torch.tensor([[*prompts[int(response.request_id)], *response.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, -len(response.token_ids) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, ids[0, -len(response.token_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-5, rtol=0)


def test_native_and_hf_engines_draw_the_same_tokens(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    from verl.rollout.hf import HFRollout

    model = tiny("qwen2")
    sampling = SamplingParams(
        max_tokens=12, temperature=1.2, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.3
    )
    requests = [Request(str(i), p, sampling, n=2, seed=9) for i, p in enumerate(prompts)]
    ours = by_sample(native(model).generate(requests))
    reference = by_sample(HFRollout(model, None).generate(requests))
    assert {key: r.token_ids for key, r in ours.items()} == {key: r.token_ids for key, r in reference.items()}


def test_abort_and_resume_continue_exactly(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    model = tiny("llama")
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request("long", prompts[2], long, n=3, seed=4), Request("short", prompts[1], short)]
    whole = by_sample(native(model).generate(requests))
    engine = native(model)
    stream = engine.generate(requests)
    first = next(stream)
    assert first.request_id == "short"
    engine.abort()
    rest = by_sample(stream)
    assert {r.finish_reason for r in rest.values()} == {"abort"} and len(rest) == 3
    partial = tuple(rest["long", i].token_ids for i in range(3))
    assert all(0 < len(part) < 30 for part in partial)
    resumed = by_sample(engine.generate([Request("long", prompts[2], long, n=3, seed=4, partial=partial)]))
    for i in range(3):
        assert [*partial[i], *resumed["long", i].token_ids] == whole["long", i].token_ids
        joined = [*rest["long", i].log_probs, *resumed["long", i].log_probs]
        assert joined == pytest.approx(whole["long", i].log_probs, abs=1e-5)


def test_abort_by_name_ends_waiting_and_running_samples(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    engine = native(tiny("llama"), max_num_seqs=2)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    stream = engine.generate([Request(str(i), p, sampling, n=3) for i, p in enumerate(prompts)])
    engine.abort(["3", "4"])
    answers = by_sample(stream)
    assert len(answers) == 15
    for (name, _), response in answers.items():
        assert (response.finish_reason == "abort") == (name in "34")


def test_responses_stream_as_they_finish(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    requests = wide_requests(prompts, n=1)
    order = [response.request_id for response in native(tiny("llama")).generate(requests)]
    assert order == [f"r{i}" for i in range(5)]


def test_new_weights_are_used_without_any_call(
    native: Callable[..., NativeRollout],
    tiny: Callable[..., Any],
    prompts: list[list[int]],
    greedy_reference: Callable[..., Any],
) -> None:
    model = tiny("llama", seed=1)
    engine = native(model)
    before = by_sample(engine.generate([Request("a", prompts[4], GREEDY)]))["a", 0].token_ids
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    after = by_sample(engine.generate([Request("a", prompts[4], GREEDY)]))["a", 0].token_ids
    assert after == greedy_reference(model, prompts[4], 12)[0]
    assert after != before


def test_lora_adapters_are_part_of_the_policy(
    native: Callable[..., NativeRollout],
    tiny: Callable[..., Any],
    prompts: list[list[int]],
    greedy_reference: Callable[..., Any],
) -> None:
    peft = pytest.importorskip("peft")
    base = tiny("llama", seed=2)
    plain = greedy_reference(base, prompts[3], 12)[0]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    answer = by_sample(native(model.train()).generate([Request("a", prompts[3], GREEDY)]))
    assert model.training
    model.eval()
    expected, _ = greedy_reference(model.get_base_model(), prompts[3], 12)
    assert answer["a", 0].token_ids == expected
    assert expected != plain


def test_a_request_larger_than_the_cache_is_refused(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any]
) -> None:
    engine = native(tiny("llama"), cache_tokens=32)
    with pytest.raises(RolloutError, match="limit is 32"):
        list(engine.generate([Request("a", [1] * 30, SamplingParams(max_tokens=30))]))
    engine = native(tiny("llama"), max_model_len=20)
    with pytest.raises(RolloutError, match="limit is 20"):
        engine.generate([Request("a", [1] * 30, SamplingParams(max_tokens=30))])


def test_the_module_is_left_as_it_was_also_when_abandoned(
    native: Callable[..., NativeRollout], tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    model.train()
    engine = native(model)
    requests = [Request(str(n), prompts[0], SamplingParams(max_tokens=n, ignore_eos=True)) for n in (3, 60)]
    stream = engine.generate(requests)
    next(stream)
    assert torch.is_grad_enabled()
    with pytest.raises(RolloutError, match="needs an idle engine"):
        engine.generate([Request("b", prompts[0])])
    stream.close()
    assert model.training and model.config._attn_implementation == before
    engine.generate(requests).close()
    assert engine.stats().waiting == 0, "closed before anything was read"
    model.eval()
    assert list(engine.generate([])) == []


def test_eight_bit_weights_are_close_and_follow_the_trainer(
    tiny: Callable[..., Any], prompts: list[list[int]]
) -> None:
    model = tiny("qwen3")
    engine = NativeRollout(model, None, small(dtype="fp8"))
    asked = [Request(str(i), p, GREEDY) for i, p in enumerate(prompts)]
    plain = by_sample(NativeRollout(model, None, small()).generate(asked))
    coarse = by_sample(engine.generate(asked))
    second = [
        (coarse[key].log_probs[1], plain[key].log_probs[1])
        for key in plain
        if coarse[key].token_ids[:2] == plain[key].token_ids[:2]
    ]
    assert len(second) >= 3
    assert all(abs(ours - exact) < 0.3 for ours, exact in second)
    assert any(ours != exact for ours, exact in second), "nothing was rounded"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    after = by_sample(engine.generate(asked))
    fresh = by_sample(NativeRollout(model, None, small(dtype="fp8")).generate(asked))
    assert {key: r.token_ids for key, r in after.items()} == {key: r.token_ids for key, r in fresh.items()}
    assert any(after[key].token_ids != coarse[key].token_ids for key in after)


@pytest.mark.parametrize(
    ("architecture", "dtype", "said"),
    [
        ("llama", "float16", "the weights are float32"),
        ("llama", "int3", "auto, fp8, float32, bfloat16, float16"),
        ("gemma", "fp8", "serves Llama"),
    ],
)
def test_a_type_that_cannot_be_served_is_refused(
    tiny: Callable[..., Any], architecture: str, dtype: str, said: str
) -> None:
    engine = NativeRollout(tiny(architecture), None, small(dtype=dtype))
    with pytest.raises(ConfigError, match=said):
        list(engine.generate([Request("a", [5], GREEDY)]))
    assert list(
        NativeRollout(tiny("llama"), None, small(dtype="float32")).generate([Request("a", [5], GREEDY)])
    )
