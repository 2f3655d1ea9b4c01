"""Exact mode: engine and trainer give the same bits, for every architecture and under every circumstance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SHAPE

from verl.models.attention import AttentionCall, dense_attention, use_verl_attention
from verl.models.exact import _by_element, exact_attention, linear, row_counts, use_exact
from verl.models.fused_linear import HeadOptions
from verl.models.lora import ADAPTER, adapted_layers, add_lora
from verl.models.packing import pack, pack_shared, packed_forward
from verl.rollout.base import Request, Response, SamplingParams
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.engine_state import Limits

CPU = torch.device("cpu")
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama_odd": ("LlamaConfig", {"hidden_size": 20, "intermediate_size": 27, "head_dim": 6}),
    "mistral": ("MistralConfig", {"sliding_window": 70}),
    "llama_vocabulary": ("LlamaConfig", {"vocab_size": 9001}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 70, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
SAMPLING = SamplingParams(max_tokens=40, temperature=0.9, ignore_eos=True)


def exact_model(name: str, seed: int = 0) -> Any:
    import transformers

    config_name, extra = MODELS[name]
    config = getattr(transformers, config_name)(**{**SHAPE, "num_hidden_layers": 3, **extra})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)
        for layer in model.model.layers:
            if hasattr(layer.self_attn, "sinks"):
                layer.self_attn.sinks.normal_()
    assert use_verl_attention(model)
    use_exact(model, CPU, torch.float32)
    return model


def prompts_of(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


def trainer_log_probs(
    model: Any, rows: list[tuple[list[int], list[int]]], packed: Any = pack, temperature: float = 0.9
) -> list[list[float]]:
    """Of the responses, by one pass over all rows."""
    width = max(len(r) for _, r in rows)
    prompt = max(len(p) for p, _ in rows)
    ids = torch.zeros(len(rows), prompt + width, dtype=torch.long)
    attended, wanted = torch.zeros_like(ids), torch.zeros(len(rows), width, dtype=torch.long)
    for row, (p, r) in enumerate(rows):
        ids[row, prompt - len(p) : prompt + len(r)] = torch.tensor(p + r)
        attended[row, prompt - len(p) : prompt + len(r)] = 1
        wanted[row, : len(r)] = 1
    found = packed(ids, attended, wanted, CPU)
    out = found.unpack(packed_forward(model, found, HeadOptions(temperature=temperature))["log_probs"])
    return [out[row, : len(r)].tolist() for row, (_, r) in enumerate(rows)]


def assert_exact(model: Any, prompts: dict[str, list[int]], responses: list[Response]) -> None:
    assert sum(len(response.token_ids) for response in responses) > 0
    rows = [(list(prompts[r.request_id]), list(r.token_ids)) for r in responses if r.token_ids]
    drawn = [list(r.log_probs) for r in responses if r.token_ids]
    together = trainer_log_probs(model, rows)
    assert drawn == together
    assert drawn == trainer_log_probs(model, rows, pack_shared)
    for split in (1, 3):
        parts = [rows[at : at + split] for at in range(0, len(rows), split)]
        assert drawn == [row for part in parts for row in trainer_log_probs(model, part)]


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_agree(name: str) -> None:
    """Groups with a common prompt, lengths around the borders of blocks, prompts in chunks, few rows at a time."""
    model = exact_model(name)
    prompts = dict(zip("abcdef", prompts_of(1, 15, 33, 63, 64, 130), strict=True))
    engine = NativeRollout(model, None, Limits(max_num_batched_tokens=50, max_num_seqs=7))
    responses = list(engine.generate([Request(name, ids, SAMPLING, n=2) for name, ids in prompts.items()]))
    assert len(responses) == 12
    assert_exact(model, prompts, responses)


def test_adapters_are_exact_too() -> None:
    model = exact_model("qwen3")
    add_lora(model, rank=3, alpha=5, target_modules=["all-linear"])
    torch.manual_seed(1)
    for _, layer in adapted_layers(model):
        torch.nn.init.normal_(layer.lora_B[ADAPTER].weight, std=0.3)
    prompts = dict(zip("abc", prompts_of(3, 40, 90), strict=True))
    engine = NativeRollout(model, None, Limits(max_num_batched_tokens=30))
    assert_exact(
        model, prompts, list(engine.generate([Request(k, p, SAMPLING, n=3) for k, p in prompts.items()]))
    )


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_no_schedule_of_the_engine_changes_a_bit(data: st.DataObject) -> None:
    """Requests arrive, are aborted, resumed with what they had and preempted by longer ones; the engine sleeps."""
    name = data.draw(st.sampled_from(["llama", "gemma2", "qwen3_moe"]))
    model = exact_model(name)
    limits = Limits(
        max_num_batched_tokens=data.draw(st.integers(5, 90)), max_num_seqs=data.draw(st.integers(1, 9))
    )
    engine, prompts, found, waiting = NativeRollout(model, None, limits, verify=False), {}, [], []
    for number in range(data.draw(st.integers(2, 5))):
        near = data.draw(st.sampled_from([1, 16, 60, 64, 120, 128])) + data.draw(st.integers(0, 5))
        (ids,) = prompts_of(near, seed=number % 2)  # some begin alike
        most = data.draw(st.integers(1, 40))
        sampling = SamplingParams(max_tokens=most, temperature=0.9, ignore_eos=True)
        prompts[str(number)] = ids
        engine.submit([Request(str(number), ids, sampling, n=data.draw(st.integers(1, 3)))])
        for _ in range(data.draw(st.integers(0, 9))):
            found += engine.poll(0)
        action = data.draw(st.sampled_from(["none", "abort", "sleep", "recompute"]))
        if action == "abort":
            engine.abort([str(number)])
        elif action == "sleep":
            engine.sleep()
        elif action == "recompute":
            engine.update_weights(None, engine.version)
    while responses := engine.poll():
        found += responses
    for response in found:
        if response.finish_reason == "abort" and response.token_ids:
            key = f"{response.request_id}/{response.sample}"
            prompts[key] = [*prompts[response.request_id], *response.token_ids]
            sampling = SamplingParams(max_tokens=20, temperature=0.9, ignore_eos=True)
            waiting.append(Request(key, prompts[key], sampling))
    found += list(engine.generate(waiting)) if waiting else []
    if any(response.token_ids for response in found):
        assert_exact(model, prompts, found)


def test_turns_of_a_conversation_reuse_what_was_computed() -> None:
    model = exact_model("mistral")
    engine, prompts, found = NativeRollout(model, None, Limits(max_num_batched_tokens=40)), {}, []
    (ids,) = prompts_of(50)
    for turn in range(4):
        prompts[str(turn)] = list(ids)
        (response,) = engine.generate([Request(str(turn), ids, SAMPLING, prefix_id="chat")])
        found.append(response)
        ids = [*ids, *response.token_ids, *prompts_of(3 + turn, seed=turn)[0]]
    assert engine.stats().prefilled_tokens < sum(map(len, prompts.values()))
    assert_exact(model, prompts, found)


def test_samples_of_a_prompt_differ() -> None:
    model = exact_model("llama")
    (prompt,) = prompts_of(20)
    responses = NativeRollout(model, None).generate([Request("a", prompt, SAMPLING, n=8)])
    assert len({tuple(response.token_ids) for response in responses}) == 8


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inner", "outer"), [(20, 27), (576, 192), (1536, 576), (896, 4864)])
def test_a_row_of_a_product_is_the_same_in_any_company(inner: int, outer: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randn(300, inner, generator=generator),
            torch.randn(outer, inner, generator=generator),
        )
        whole = linear(x, weight)
        assert 16 in row_counts(inner, outer, False, threads)
        for count in (1, 2, 7, 15, 16, 17, 33, 100, 257):
            for start in (0, 5, 43):
                assert torch.equal(linear(x[start : start + count], weight), whole[start : start + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, lambda x: F.gelu(x, approximate="tanh")])
def test_the_last_elements_are_computed_as_the_others(function: Any) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    whole = function(torch.cat([x, x]))[:5000]
    assert any(not torch.equal(function(x[:size]), whole[:size]) for size in range(1, 100)), "else not needed"
    for size in range(1, 100):
        assert torch.equal(_by_element(function, x[:size]), whole[:size])


@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (5.0, False), (None, True)])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (130, 130), (3, 100), (65, 128)])
def test_attention_and_its_gradients_are_those_of_the_definition(
    queries: int, keys: int, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, requires_grad=True) for h, n in ((6, queries), (2, keys), (2, keys)))
    inputs = [q, k, v, *([torch.randn(6, requires_grad=True)] if has_sinks else [])]
    call = AttentionCall(q, k, v, None, window, softcap, sink=inputs[3] if has_sinks else None)
    ours, theirs = exact_attention(call), dense_attention(call)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    grad = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama_odd", "gemma2", "mixtral", "gpt_oss"])
def test_gradients_are_those_of_the_ordinary_passes(name: str) -> None:
    model = exact_model(name)
    ids, ones = torch.tensor(prompts_of(40, 40)), torch.ones(2, 40, dtype=torch.long)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        packed_forward(model, pack(ids, ones, ones[:, 1:], CPU))["log_probs"].sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    exact = gradients()
    model.verl_exact = False
    use_verl_attention(model)
    for ours, plain in zip(exact, gradients(), strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-4 * float(plain.abs().max()), rtol=1e-3)
