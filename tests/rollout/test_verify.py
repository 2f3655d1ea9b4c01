"""Engines that generate in place refuse a model they would sample from wrongly, before the first token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_architectures import build_architecture, known_model_types

from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.hf import HFRollout
from verl.rollout.native import Limits, NativeRollout

ASKED = [Request("a", [5, 6, 7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True))]
PATHS = pytest.mark.parametrize("on_device", [False, True], ids=["cpu path", "device path"])


def generate(model: Any, on_device: bool, requests: list[Request] = ASKED, **limits: Any) -> list[Any]:
    return list(NativeRollout(model, None, Limits(**limits), on_device=on_device).generate(requests))


def smear(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A state that does not go through attention: every token adds something of the one before it."""
    return output + 0.3 * torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], dim=1)


@pytest.mark.slow(seconds=2)
@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_beside_the_cache_is_noticed(
    tiny: Callable[..., Any], on_device: bool, dtype: torch.dtype
) -> None:
    model = tiny("llama").to(dtype)
    assert len(generate(model, on_device)) == 1
    # The attention itself: the fused decoder of the device path does not call the layer.
    model.model.layers[1].self_attn.v_proj.register_forward_hook(smear)
    with pytest.raises(
        RolloutError, match="native cannot generate from LlamaForCausalLM: .* use rollout.name=vllm"
    ):
        generate(model, on_device)


@PATHS
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("deepseek_v4", "caches more than keys and values"),
        ("hy_v4", "more than queries, keys and values .indices"),
        ("diffllama", "call their attention more than once|does not call its attention through"),
        ("lfm2", "log-probs differ"),
        ("granitemoehybrid", "log-probs differ"),
        ("minimax", "log-probs differ|Expected size for first two dimensions"),
    ],
)
def test_architectures_that_ask_more_of_an_engine_are_refused(
    architecture: str, reason: str, on_device: bool
) -> None:
    """The second reason, where there are two, is that of older versions of transformers."""
    if architecture not in known_model_types():
        pytest.skip(f"the installed transformers has no {architecture}")
    with pytest.raises(RolloutError, match=reason) as caught:
        generate(build_architecture(architecture), on_device)
    assert "\n" not in str(caught.value)


@PATHS
def test_a_window_only_the_mask_knows_is_noticed_though_no_probe_is_that_long(
    tiny: Callable[..., Any], on_device: bool
) -> None:
    import transformers
    from tiny_models import SHAPE

    options = {**SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 2048}
    model = transformers.PhimoeForCausalLM(
        transformers.PhimoeConfig(**options | {"max_position_embeddings": 4096})
    )
    with pytest.raises(RolloutError, match="masks attention otherwise than causally"):
        generate(model.eval(), on_device)


def test_a_model_is_compared_once_and_a_new_one_again(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.rollout import hf
    from verl.rollout.native import engine

    compared: list[Any] = []
    for module in (hf, engine):
        monkeypatch.setattr(module, "verify", lambda model, *_: compared.append(model))
    first, second = tiny("llama"), tiny("llama", seed=1)
    for made in (NativeRollout(first, None, Limits(), on_device=True), HFRollout(first, None)):
        compared.clear()
        for source in (first, None, second, second):
            made.update_weights(source, 1)
            list(made.generate(ASKED))
        assert compared == [first, second]


def test_the_comparison_leaves_nothing_behind(tiny: Callable[..., Any]) -> None:
    model = tiny("llama").bfloat16()
    model.train()
    modes = [module.training for module in model.modules()]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    weights = [(weight.data_ptr(), weight.dtype) for weight in model.parameters()]
    attention = model.config._attn_implementation
    generate(model, True)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention
    assert [(weight.data_ptr(), weight.dtype) for weight in model.parameters()] == weights
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_broken_weights_are_still_called_so(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(RolloutError, match="NaN or infinite"):
        generate(model, True)


@PATHS
def test_frequencies_that_change_with_the_length_are_refused_beyond_their_limit(
    tiny: Callable[..., Any], on_device: bool
) -> None:
    """The cache would hold keys that a forward over the whole sequence does not have."""
    model = tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    limit = model.config.max_position_embeddings
    within = [Request("a", [5] * (limit - 3), SamplingParams(max_tokens=3, ignore_eos=True))]
    assert len(generate(model, on_device, within)) == 1
    beyond = [Request("a", [5] * (limit - 3), SamplingParams(max_tokens=4, ignore_eos=True))]
    with pytest.raises(
        RolloutError, match=f"beyond {limit} the rotary embedding .*dynamic.*rollout.name=vllm"
    ):
        generate(model, on_device, beyond)
    hf = HFRollout(model, None)
    assert len(list(hf.generate(within))) == 1
    with pytest.raises(RolloutError, match=f"beyond {limit} the rotary embedding"):
        list(hf.generate(beyond))


@pytest.mark.parametrize("architecture", ["qwen3_next", "falcon_h1", "lfm2", "mamba2", "bloom"])
def test_the_hf_engine_serves_recurrent_layers(architecture: str) -> None:
    """Rows of several lengths; some end early, so that the cache is cut down to the others."""
    model = build_architecture(architecture)
    asked = [
        Request(
            str(i),
            [(7 * j + i) % 100 + 3 for j in range(3 + 2 * i)],
            SamplingParams(max_tokens=2 + 3 * (i > 1)),
        )
        for i in range(4)
    ]
    for answer in HFRollout(model, None).generate(asked):
        prompt = list(asked[int(answer.request_id)].prompt_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids]), use_cache=False).logits[0]
        own = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        own = own.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), own, rtol=1e-4, atol=1e-4)


def test_the_hf_engine_refuses_a_model_without_a_usable_cache() -> None:
    with pytest.raises(
        RolloutError, match="hf cannot generate from OpenAIGPTLMHeadModel.*use rollout.name=vllm"
    ):
        list(HFRollout(build_architecture("openai-gpt"), None).generate(ASKED))
