"""Adapters: what is trained, what is merged, what is saved."""

from __future__ import annotations

import sys

import pytest
import torch

from verl.errors import ConfigError, MissingPackage
from verl.models.lora import adapters_off, add_lora, merged_weights, save_adapter

IDS = torch.arange(6)[None]


def adapted(tiny, targets=("all-linear",)):
    model = tiny()
    add_lora(model, rank=3, alpha=6, target_modules=targets)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=generator))
    return model


def test_a_peft_that_does_not_go_with_transformers_is_not_called_missing(tiny, tmp_path, monkeypatch):
    (tmp_path / "peft.py").write_text("from transformers import HybridCacheOfOldVersions\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    with pytest.raises(
        MissingPackage, match=r"cannot be imported \(cannot import name 'Hybrid.*pip install 'peft>="
    ):
        add_lora(tiny(), rank=2, alpha=4, target_modules=["all-linear"])


def test_only_adapters_are_trained(tiny):
    model = adapted(tiny)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


def test_named_targets_only(tiny):
    model = adapted(tiny, ("q_proj", "v_proj"))
    places = {name.split(".")[-4] for name, param in model.named_parameters() if param.requires_grad}
    assert places == {"q_proj", "v_proj"}


def test_off_is_the_model_that_was_loaded(tiny):
    model = adapted(tiny)
    plain = tiny()(IDS).logits
    assert not torch.allclose(model(IDS).logits, plain, atol=1e-3)
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, plain)
    assert not torch.allclose(model(IDS).logits, plain, atol=1e-3)


def test_merged_weights_have_the_old_names_and_the_new_answers(tiny):
    model, plain = adapted(tiny), tiny()
    weights = dict(merged_weights(model))
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", ["all-linear", "c_attn", "attn.c_proj", "mlp.c_proj", "c_fc"])
def test_layers_that_keep_their_weights_transposed_are_merged_and_saved_so(tiny, targets, tmp_path):
    """GPT-2's; the weight of attn.c_proj is square, so that no shape would tell."""
    import peft

    def gpt2():
        return tiny("gpt2", n_embd=16, n_layer=2, n_head=2, n_positions=32)

    model, plain = adapted(gpt2, (targets,)), gpt2()
    plain.load_state_dict(dict(merged_weights(model)))
    assert not torch.allclose(gpt2()(IDS).logits, model(IDS).logits, atol=1e-2)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    save_adapter(model, tmp_path)
    opened = peft.PeftModel.from_pretrained(gpt2(), str(tmp_path))
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_peft_opens_what_was_saved(tiny, tmp_path):
    import peft

    model = adapted(tiny)
    save_adapter(model, tmp_path)
    opened = peft.PeftModel.from_pretrained(tiny(), str(tmp_path))
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_what_all_linear_leaves_out_is_named(tiny, caplog):
    """In transformers the experts of a mixture are parameters, no linear layers."""
    mixture = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    adapted(lambda: tiny("qwen3_moe", **mixture))
    (line,) = [record.getMessage() for record in caplog.records if "all-linear" in record.getMessage()]
    assert "k_proj, o_proj, q_proj, v_proj get adapters" in line
    assert "experts.down_proj, experts.gate_up_proj are no linear layers" in line
    caplog.clear()
    adapted(tiny)
    assert "all-linear" not in caplog.text


def test_names_that_peft_takes_for_experts_are_left_out_or_refused(tiny):
    """The dense layers and shared experts of GLM-4.5 have linear layers of these names."""

    def mixture():
        return tiny("glm4_moe", head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
                    n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=8)  # fmt: skip

    model, plain = adapted(mixture), mixture()
    plain.load_state_dict(dict(merged_weights(model)))
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    pytest.importorskip(
        "peft.utils.transformers_weight_conversion", reason="this peft adapts linear layers only"
    )
    assert sorted(model.verl_lora_config.target_modules) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    with pytest.raises(ConfigError, match="gate_proj, which peft takes for the experts"):
        add_lora(mixture(), rank=2, alpha=2, target_modules=("q_proj", "gate_proj"))


@pytest.mark.parametrize("target", ["query", "embed_tokens", "mlp"])
def test_what_is_no_linear_layer_lists_those_that_are(tiny, target):
    with pytest.raises(ConfigError, match=rf"{target}.*down_proj.*q_proj"):
        add_lora(tiny(), rank=2, alpha=2, target_modules=(target,))
