"""A tiny model for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def tiny_model(architecture: str = "llama", **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": 53,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    options.update(changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options)).eval()


@pytest.fixture
def tiny() -> Any:
    return tiny_model
