"""Merging a LoRA adapter from disk: as peft merges it, and everything in it or nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from verl.errors import ModelError
from verl.models.lora import merge_adapter

peft = pytest.importorskip("peft")


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2))


def save(model: Any, folder: Path, **settings: Any) -> Any:
    """An adapter with random weights on the model; the model peft merged."""
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=3, lora_alpha=5, **settings))
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (llama, {"target_modules": ["q_proj", "down_proj"]}),
        (llama, {"target_modules": ["q_proj"], "use_rslora": True}),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
)
def test_merged_as_peft_merges(build: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    model = build()
    expected = save(model, tmp_path, **settings)
    before = copy.deepcopy(model)
    changed = merge_adapter(model, tmp_path)
    differs = 0
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], weight)
        differs += not torch.equal(dict(before.named_parameters())[name], weight)
    assert differs == changed > 0


def test_a_half_precision_model_is_summed_in_float32(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    exact = {name: weight.float() for name, weight in copy.deepcopy(model).named_parameters()}
    adapter = save(llama(), tmp_path, target_modules=["q_proj"])
    del adapter
    merge_adapter(model, tmp_path)
    from safetensors.torch import load_file

    parts = load_file(tmp_path / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    low, up = (parts[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    whole = (exact[f"{name}.weight"] + 5 / 3 * up @ low).to(torch.bfloat16)
    assert torch.equal(dict(model.named_parameters())[f"{name}.weight"], whole)


def test_what_does_not_belong_is_refused(tmp_path: Path) -> None:
    save(llama(), tmp_path, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="trained on another model"):
        merge_adapter(gpt2(), tmp_path)
    wide = LlamaForCausalLM(
        LlamaConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    with pytest.raises(ModelError, match="has shape"):
        merge_adapter(wide, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        merge_adapter(llama(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be understood"):
        merge_adapter(llama(), tmp_path)
