"""How many weights a token meets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl.models.introspection import token_weights


def _total(module: nn.Module, config: object) -> int:
    return round(sum(count for _, count in token_weights(module, config)))


def test_a_dense_model_counts_every_weight():
    layer = nn.Linear(7, 5)
    assert _total(layer, SimpleNamespace(num_experts=None)) == 7 * 5 + 5


def test_a_mixture_counts_the_experts_a_token_is_sent_to():
    """Compared with the products torch counts in a forward pass."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    tokens = 11
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    products = sum(
        flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operation) and "bmm" not in str(operation)
    )
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert products == 2 * tokens * (_total(model, config) - norms)


@pytest.mark.parametrize(
    "names", [("num_local_experts", "num_experts_per_tok"), ("moe_num_experts", "moe_k")]
)
def test_experts_in_a_list_of_modules_are_counted_the_same(names):
    model = nn.Module()
    model.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(6)])
    model.shared_experts = nn.Linear(4, 4, bias=False)
    config = SimpleNamespace(**dict(zip(names, (6, 2), strict=True)))
    assert _total(model, config) == 2 * 16 + 16
