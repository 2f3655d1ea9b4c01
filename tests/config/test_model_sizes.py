"""Sizes of models: parameters, critic, adapters and KV cache, of any architecture transformers builds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from verl.config.sizes import read_sizes, sizes_of
from verl.errors import ModelError

SMALL = {
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 208,
    "vocab_size": 211,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3_moe", MOE),
    ("qwen3_moe", {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("mixtral", {"num_local_experts": 3}),
    ("gemma", {"head_dim": 24}),
    ("gemma2", {"head_dim": 24}),
    ("gemma3_text", {"head_dim": 24}),
    ("phi", {}),
    ("phi3", {}),
    ("gpt2", {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 50, "vocab_size": 211}),
]


def build(kind: str, changes: dict[str, Any]) -> Any:
    """The model on the meta device: shapes, no memory."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = changes if kind == "gpt2" else {**SMALL, **changes}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=[f"{k}-{'-'.join(c)}" for k, c in VARIANTS])
def test_cache_and_critic_are_exact(kind: str, changes: dict[str, Any]) -> None:
    model = build(kind, changes)
    sizes = sizes_of(model)
    body = sum(parameter.numel() for parameter in model.base_model.parameters())
    assert sizes.value_parameters == body + sizes.hidden
    keys = [p for n, p in model.named_parameters() if n.endswith((".k_proj.weight", ".v_proj.weight"))]
    if keys:
        assert sizes.cache == sum(parameter.shape[0] for parameter in keys)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", ["all-linear"]),
        ("llama", ["q_proj", "v_proj"]),
        ("phi3", ["all-linear"]),
        ("qwen2", ["all-linear"]),
    ],
)
def test_adapter_parameters_equal_pefts(kind: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model = build(kind, {})
    sizes = sizes_of(model)
    modules: Any = "all-linear" if targets == ["all-linear"] else targets
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert sizes.lora_parameters(4, targets) == trained


def test_a_published_count(tmp_path: Path) -> None:
    """Qwen2.5-7B has 7.62B parameters, 6.53B of them not embeddings."""
    values = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    sizes = read_sizes(str(tmp_path))
    assert sizes is not None and sizes.parameters == 7_615_616_512
    assert round((sizes.parameters - sizes.embedding - sizes.head) / 1e9, 2) == 6.53


def test_reading_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    plain, wider = read_sizes(str(tmp_path)), read_sizes(str(tmp_path), {"vocab_size": 311})
    assert plain is not None and wider is not None
    assert wider.parameters - plain.parameters == 2 * 100 * 96
    text = {**SMALL, "model_type": "gemma3_text", "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    nested = read_sizes(str(tmp_path))
    assert nested is not None and (nested.hidden, nested.layers) == (96, 5)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_sizes("org/not-here") is None
    snapshot = tmp_path / "hub" / "models--org--here" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert read_sizes("org/here") == plain


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "brand_new"}'), "brand_new"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'), "no language model"),
    ],
)
def test_bad_model_folders(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path)
    with pytest.raises(ModelError, match=words):
        read_sizes(str(tmp_path))


def test_a_missing_local_folder_is_not_taken_for_an_id(tmp_path: Path) -> None:
    for path in (str(tmp_path / "no"), "./models/x", "a/b/c"):
        with pytest.raises(ModelError, match="no model folder"):
            read_sizes(path)
