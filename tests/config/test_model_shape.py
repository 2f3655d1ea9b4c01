"""Parameter counts from config.json equal those of the model transformers builds, family by family."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from verl.config.model_shape import FAMILIES, read_shape, shape_of
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
def test_parameters_cache_and_critic_are_exact(kind: str, changes: dict[str, Any]) -> None:
    model = build(kind, changes)
    shape = shape_of(json.loads(model.config.to_json_string(use_diff=False)))
    assert shape.exact
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    body = sum(parameter.numel() for parameter in model.base_model.parameters())
    assert shape.value_parameters == body + shape.hidden
    keys = [p for n, p in model.named_parameters() if n.endswith((".k_proj.weight", ".v_proj.weight"))]
    if keys:
        assert shape.cache_elements == sum(parameter.shape[0] for parameter in keys)


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
    shape = shape_of(json.loads(model.config.to_json_string(use_diff=False)))
    modules: Any = "all-linear" if targets == ["all-linear"] else targets
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape.lora_parameters(4, targets) == trained


def test_every_family_is_compared() -> None:
    assert {kind for kind, _ in VARIANTS} == set(FAMILIES)


def test_a_published_count() -> None:
    """Qwen2.5-7B has 7.62B parameters, 6.53B of them not embeddings."""
    shape = shape_of(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        }
    )
    assert shape.parameters == 7_615_616_512
    assert round((shape.parameters - shape.embedding - shape.head) / 1e9, 2) == 6.53


def test_an_unknown_family_says_that_it_is_guessed() -> None:
    known = shape_of({**SMALL, "model_type": "llama"})
    guessed = shape_of({**SMALL, "model_type": "brand_new"})
    assert known.exact and not guessed.exact
    assert guessed.parameters == known.parameters


def test_reading_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    plain, wider = read_shape(str(tmp_path)), read_shape(str(tmp_path), {"vocab_size": 311})
    assert plain is not None and wider is not None
    assert wider.parameters - plain.parameters == 2 * 100 * 96
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**SMALL, "model_type": "gemma3_text"}}))
    nested = read_shape(str(tmp_path))
    assert nested is not None and nested.model_type == "gemma3_text"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_shape("org/not-here") is None
    snapshot = tmp_path / "hub" / "models--org--here" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert read_shape("org/here") == plain


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no config of a model"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "hidden_size"),
    ],
)
def test_bad_model_folders(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path)
    with pytest.raises(ModelError, match=words):
        read_shape(str(tmp_path))


def test_a_missing_local_folder_is_not_taken_for_an_id(tmp_path: Path) -> None:
    for path in (str(tmp_path / "no"), "./models/x", "a/b/c"):
        with pytest.raises(ModelError, match="no model folder"):
            read_shape(path)
