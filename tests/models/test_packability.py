"""Models that cannot be packed are found out by running them."""

from __future__ import annotations

import pytest
import torch

from verl.models.attention import use_verl_attention
from verl.models.forward import attach
from verl.models.packability import head_fault, packing_fault
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
