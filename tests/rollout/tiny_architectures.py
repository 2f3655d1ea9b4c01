"""A tiny model of every causal language model that transformers knows, by model type."""

from __future__ import annotations

from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
}
"""Passed on as far as a configuration knows the name. The window is shorter than the prompts of the tests."""

LARGEST = 2_000_000
"""Parameters; a model above is not tiny, and its entry below is wrong."""

_BOTH = ["sliding_attention", "full_attention"]
_WINDOWED = {"layer_types": _BOTH}
_IS_DECODER = {"is_decoder": True}
_LINEAR = ["linear_attention", "full_attention"]
_DELTA = {
    "layer_types": _LINEAR,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MLA = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_INDEXED = {**_MLA, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
"""Fewer index heads would often all be 0 behind their ReLU, and which of equal scores is selected is arbitrary."""
_SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_DECODER = {
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "hidden_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "is_decoder": True,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
_GEMMA4 = {
    **_PER_LAYER,
    "num_hidden_layers": 4,
    "layer_types": _BOTH * 2,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
}
_GEMMA4_UNIFIED = {"layer_types": _BOTH, "global_head_dim": 32}
_NGRAMS = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 64,
    "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 0],
}

CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), _MLA
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), _INDEXED),
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
            "trocr",
            "whisper",
        ),
        _DECODER,
    ),
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "ernie",
            "megatron-bert",
            "roberta",
            "roberta-prelayernorm",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _IS_DECODER,
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(
        (
            "cohere2",
            "exaone4",
            "exaone_moe",
            "gemma2",
            "gemma3_text",
            "gpt_oss",
            "ministral",
            "olmo3",
            "vaultgemma",
        ),
        _WINDOWED,
    ),
    "bailing_hybrid": {
        **_MLA,
        "head_dim": 16,
        "layer_group_size": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
    },
    "bamba": {**_SSM, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _BOTH,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _BOTH},
    },
    "cpmant": {
        "dim_head": 16,
        "dim_ff": 96,
        "position_bias_num_buckets": 16,
        "prompt_types": 4,
        "prompt_length": 4,
        "segment_types": 4,
    },
    "ctrl": {"dff": 96},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "hidden_size": None,
        "num_attention_heads": None,
        "num_hidden_layers": None,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 2,
    },
    "dots1": {"n_shared_experts": 1},
    "electra": {"is_decoder": True, "embedding_size": 64},
    "emu3": {
        "text_config": COMMON,
        "vq_config": {
            "codebook_size": 16,
            "embed_dim": 4,
            "latent_channels": 4,
            "base_channels": 32,
            "num_res_blocks": 1,
            "channel_multiplier": [1],
            "attn_resolutions": [],
        },
        "vocabulary_map": {"<image>": 3},
    },
    "falcon": {"head_dim": None},
    "falcon_h1": {**_SSM, "mamba_d_ssm": 128},
    "fuyu": {"text_config": {**COMMON, "model_type": "persimmon"}, "patch_size": 4},
    "gemma3": {
        "text_config": {**COMMON, "layer_types": _BOTH},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 120,
    },
    "gemma3n_text": {
        **_PER_LAYER,
        "num_hidden_layers": 4,
        "layer_types": _BOTH * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4": {"text_config": {**COMMON, **_GEMMA4}},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": {**COMMON, **_GEMMA4_UNIFIED}},
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "git": {"vision_config": _VISION},
    "got_ocr2": {
        "text_config": {**COMMON, "model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "mlp_dim": 32,
            "global_attn_indexes": [0],
        },
        "image_token_index": 120,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_SSM, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "d_rel": 4,
        "rel_extent": 32,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "kimi_linear": {
        **_MLA,
        "q_lora_rank": None,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": _LINEAR,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": {**COMMON, **_LLAMA4}, "vision_config": {**_VISION, "vision_output_dim": 32}},
    "llama4_text": _LLAMA4,
    "longcat_flash": {
        **_MLA,
        "num_layers": 2,
        "num_hidden_layers": None,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "moe_topk": 2,
        "head_dim": 8,
    },
    "mamba": {"state_size": 8, "expand": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "expand": 2, "n_groups": 2, "chunk_size": 16},
    "mimo_v2_flash": {"v_head_dim": 8},
    "minimax": {"layer_types": _LINEAR, "block_size": 8},
    "mllama": {
        "text_config": {**COMMON, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_size": 32,
            "image_size": 28,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
    },
    "moss_transcribe_diarize": {
        "text_config": {**COMMON, "model_type": "qwen3"},
        "audio_config": {
            "num_mel_bins": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "hidden_size": 32,
            "max_source_positions": 16,
        },
        "audio_token_id": 120,
    },
    "moshi": {
        "ffn_dim": 96,
        "num_codebooks": 2,
        "audio_vocab_size": 32,
        "depth_decoder_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "vocab_size": 32,
        },
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": None,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {**_DELTA, "num_key_value_heads": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi4_multimodal": {
        "vision_config": {**_VISION, "num_hidden_layers": 2, "crop_size": 28, "image_token_id": 120},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "audio_token_id": 121,
        },
    },
    "phimoe": {"router_jitter_noise": 0.4},
    "prophetnet": {
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "is_decoder": True,
        "add_cross_attention": False,
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_5": {"text_config": {**COMMON, **_DELTA}},
    "qwen3_5_moe": {"text_config": {**COMMON, **_DELTA}},
    "qwen4_exp": {"text_config": {**COMMON, **_NGRAMS}},
    "qwen4_exp_text": _NGRAMS,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rembert": {"is_decoder": True, "input_embedding_size": 64, "output_embedding_size": 64},
    "roc_bert": {
        "is_decoder": True,
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 32,
        "shape_embed_dim": 16,
        "shape_vocab_size": 32,
    },
    "rwkv": {"attention_hidden_size": 64},
    "xglm": {"ffn_dim": 96},
    "xlnet": {"d_inner": 96, "d_head": 16, "max_position_embeddings": None, "attn_type": "uni"},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4,
        "attention_head_dim": 32,
        "head_dim": None,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4,
        "head_dim": None,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

NOT_TINY: dict[str, str] = {
    "blt": "a byte-level model of four networks with an own patcher; it takes no token ids alone",
    "gemma3n": "its vision tower needs the package timm (its text model is in the table)",
    "gemma4_assistant": "a draft model that reads the cache of another model",
    "gemma4_unified_assistant": "a draft model that reads the cache of another model",
    "musicgen": "transformers does not build its decoder from this configuration",
    "musicgen_melody": "transformers does not build its decoder from this configuration",
    "reformer": "trains on lengths that are multiples of its chunks only",
    "xlm": "transformers implements its encoder only",
}
"""Model types of the mapping that are not in the table, and why."""


class NotTiny(Exception):
    """A configuration that makes no tiny model."""


def known_model_types() -> list[str]:
    """Of the causal language models of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_types() -> list[str]:
    return [name for name in known_model_types() if name not in NOT_TINY]


def tiny_config(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    known = set(getattr(kind, "attribute_map", {}))
    for base in kind.__mro__:
        known |= set(vars(base).get("__annotations__", {}))
    options = {key: value for key, value in COMMON.items() if key in known}
    options |= CHANGES.get(name, {})
    return kind(**{key: value for key, value in options.items() if value is not None})


def _checked_config(name: str) -> Any:
    """NotTiny where it makes no tiny model. Configurations of an unknown version may fail with anything."""
    from transformers import AutoModelForCausalLM

    try:
        config = tiny_config(name)
        with torch.device("meta"):
            size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise NotTiny(f"{name} cannot be built: {type(error).__name__}: {error}") from error
    if size > LARGEST:
        raise NotTiny(f"{name} has {size} parameters, more than {LARGEST}")
    return config


def build_architecture(name: str, seed: int = 0) -> Any:
    """In float32, with weights large enough that every part of the model shows in its log-probs."""
    from transformers import AutoModelForCausalLM

    config = _checked_config(name)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.12)
            elif "sink" in weight_name:
                weight.normal_()
            elif "bias" in weight_name:
                weight.normal_(0, 0.1)
    return model.eval()
