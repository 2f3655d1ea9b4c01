"""A half-precision model computed in float32 gives what a float32 model of the same weights gives."""

from __future__ import annotations

import copy

import pytest
import torch

from verl.models.float32 import float32_arithmetic
from verl.models.loading import cast_parameters
from verl.models.lora import add_lora

IDS = torch.randint(3, 53, (2, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


@pytest.mark.parametrize(
    ("architecture", "changes", "adapted"),
    [
        ("llama", {"tie_word_embeddings": True}, False),
        ("llama", {"attention_bias": True}, True),
        ("qwen3_moe", MIXTURE, False),
        ("gemma2", {"head_dim": 8, "sliding_window": 4}, False),
        ("mamba", {"state_size": 4, "num_hidden_layers": 1}, False),
    ],
)
def test_half_precision_is_computed_as_float32(tiny, architecture, changes, adapted):
    model = tiny(architecture, **changes)
    if adapted:
        add_lora(model, rank=2, alpha=4, target_modules=["q_proj", "down_proj"])
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
    cast_parameters(model, torch.bfloat16)
    exact = copy.deepcopy(model)
    cast_parameters(exact, torch.float32)
    before = {name: (weight.data_ptr(), weight.dtype) for name, weight in model.named_parameters()}
    with float32_arithmetic(model):
        found = logits(model)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits(exact), rtol=1e-5, atol=1e-5)
    assert (logits(model).float() - found).abs().max() > 1e-3, "half precision rounds, or nothing was tested"
    assert {name: (weight.data_ptr(), weight.dtype) for name, weight in model.named_parameters()} == before


def test_a_float32_model_is_left_to_itself(tiny):
    model = tiny()
    with float32_arithmetic(model):
        assert torch.equal(logits(model), logits(model))
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_reduced_precision_of_float32_products_is_off_inside_and_back_after(tiny):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="broken"), float32_arithmetic(tiny()):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
            raise RuntimeError("broken")
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
