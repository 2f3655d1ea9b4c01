"""Tiny random models of every architecture the engines promise."""

from __future__ import annotations

from typing import Any

import torch

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral_window": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 512}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
}


def build_model(name: str, seed: int = 0, **changes: Any) -> Any:
    import transformers

    config_name, extra = ARCHITECTURES[name]
    config = getattr(transformers, config_name)(**{**SHAPE, **extra, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Fresh weights are so small that the logits are nearly flat and greedy ties are common: spread them.
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)
            elif "sinks" in weight_name:
                weight.normal_()
            elif "bias" in weight_name:
                weight.normal_(0, 0.1)
    return model.eval()
