"""Models that cannot be packed are found out by running them."""

from __future__ import annotations

import re

import pytest
import torch

from verl.models.attention import use_verl_attention
from verl.models.packability import (
    PackingProbe,
    head_fault,
    packing_fault,
    padding_fault,
    probe_rows,
    randomness_fault,
)
from verl.models.packing import attach
from verl.models.value_model import ValueModel

CPU = torch.device("cpu")


def fault(model):
    assert use_verl_attention(model)
    attach(model)
    found = packing_fault(model, CPU, "sdpa")
    assert model.config._attn_implementation == "verl"
    return found


def test_a_transformer_can_be_packed(tiny):
    assert fault(tiny()) is None


def test_an_untrained_critic_is_judged_by_its_backbone(tiny):
    """Its head answers 0 whatever comes in."""
    critic = ValueModel(tiny().model)
    assert fault(critic) is None
    critic.backbone.layers[0].mlp.register_forward_hook(lambda m, args, out: out + torch.roll(out, 1, dims=1))
    assert "neighbour" in fault(critic)


def test_logits_that_are_more_than_a_product_are_noticed(tiny):
    model = tiny()
    attach(model)
    assert head_fault(model, CPU, False, "sdpa") is None
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)
    assert "not hidden states times output matrix" in head_fault(model, CPU, False, "sdpa")


def test_a_layer_that_mixes_neighbours_is_noticed(tiny):
    """A convolution over the sequence, as state-space layers have, does not go through attention."""
    model = tiny()

    def smear(module, args, output):
        return output + 0.5 * torch.roll(output, 1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(smear)
    assert "neighbour" in fault(model)


def test_wrong_positions_are_noticed(tiny):
    """A model that numbers tokens itself counts on through the pack."""
    model = tiny()

    def count_on(module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        kwargs["position_ids"] = 3 * torch.arange(ids.shape[1])[None].expand(ids.shape[0], -1) ** 2 // 4
        return args, kwargs

    model.model.register_forward_pre_hook(count_on, with_kwargs=True)
    assert "differ" in fault(model)


def test_a_forward_that_takes_no_context_is_noticed(tiny):
    model = tiny()
    inner = model.model.forward
    model.model.forward = lambda input_ids, attention_mask, position_ids, use_cache: inner(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
    )
    assert "does not take packed sequences" in fault(model)


@pytest.mark.parametrize("architecture", ["mamba"])
def test_a_model_without_attention_keeps_its_own(tiny, architecture):
    model = tiny(architecture, state_size=4, expand=2, conv_kernel=3)
    assert not use_verl_attention(model)


def chaotic(tiny):
    """Sharp attention in many layers: rounding to bfloat16 grows from layer to layer, as in large models."""
    model = tiny(num_hidden_layers=12, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(4)
    return model.bfloat16()


def test_a_model_whose_rounding_exceeds_any_bound_is_packed(tiny):
    model = chaotic(tiny)
    assert use_verl_attention(model)
    attach(model)
    rows, probe = probe_rows(53, 11), PackingProbe(model, CPU, exact=False)
    with torch.no_grad():
        together = probe(rows, packed=True)
        model.set_attn_implementation("eager")
        alone = probe.alone(rows)
    noise, old_bound = float((together - alone).abs().mean()), 0.02 * (1 + float(alone.abs().mean()))
    assert noise > 2 * old_bound, "the model is not as hard as it should be"
    model.set_attn_implementation("verl")
    assert packing_fault(model, CPU, "eager") is None
    assert head_fault(model, CPU, True, "eager") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
            "differ|neighbour",
        ),
        ("doge", {}, "its own attention mask"),
        ("nemotron", {}, "keyword arguments"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_half_precision_too(tiny, architecture, changes, reason, dtype):
    model = tiny(architecture, **changes)
    if not model._supports_attention_backend:
        pytest.skip(
            f"{architecture} of the installed transformers cannot exchange its attention: it is padded"
        )
    stock = model.config._attn_implementation
    model = model.to(dtype)
    assert use_verl_attention(model)
    attach(model)
    assert re.search(reason, packing_fault(model, CPU, stock))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("phimoe", {"sliding_window": 4096, "num_local_experts": 2, "num_experts_per_tok": 1}),
        ("llama4_text", {"attention_chunk_size": 4096, "head_dim": 8, "intermediate_size_mlp": 24}),
    ],
)
def test_masks_that_differ_only_far_beyond_the_tokens_tried_are_noticed(tiny, architecture, changes):
    """A window or chunks that the model applies by its mask alone, which our attention does not get."""
    model = tiny(architecture, max_position_embeddings=8192, **changes)
    assert "masks attention otherwise than causally" in fault(model)
    plain = tiny(architecture, max_position_embeddings=4096, **changes)
    assert fault(plain) is None, "no sequence is long enough to meet the window"


def test_a_mask_that_looks_ahead_is_noticed_where_padding_changes_answers(tiny):
    model = tiny()
    attach(model)
    assert padding_fault(model, CPU) is None
    model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out + torch.roll(out, -2, dims=1))
    assert "padding changes its answers" in padding_fault(model, CPU)


def test_kernels_that_refuse_float32_are_judged_by_the_models_own_noise(tiny):
    """As some linear-attention kernels do on a GPU."""
    model = chaotic(tiny)

    def half_only(module, args):
        assert args[0].dtype == torch.bfloat16, "does not support float32"

    model.model.layers[0].mlp.register_forward_pre_hook(half_only)
    assert use_verl_attention(model)
    attach(model)
    assert packing_fault(model, CPU, "sdpa") is None
    assert head_fault(model, CPU, True, "sdpa") is None
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: out + 4 * torch.roll(out, 1, dims=1))
    assert "neighbour" in packing_fault(model, CPU, "sdpa")


def test_kernels_that_round_worse_than_the_models_own_are_refused(tiny, monkeypatch):
    """Those for packs compute in half precision only, so float32 says nothing about them."""
    from verl.models import attention

    model = tiny(num_hidden_layers=3).bfloat16()
    assert fault(model) is None
    plain = attention.dense_attention

    def worse(call):
        out = plain(call)
        return out if call.q.dtype == torch.float32 else torch.zeros_like(out)

    monkeypatch.setattr(attention, "dense_attention", worse)
    assert "in half precision packed answers are off" in fault(model)


def test_a_model_that_is_random_in_training_mode_is_noticed(tiny):
    model = tiny()
    attach(model)
    assert randomness_fault(model, CPU, False) is None

    def noisy(module, args, output):
        return output + 0.1 * torch.randn_like(output) if module.training else output

    model.model.layers[0].mlp.register_forward_hook(noisy)
    assert "training mode" in randomness_fault(model, CPU, False)
    assert not model.training
