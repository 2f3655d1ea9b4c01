"""Weights that transformers keeps in float32 beside a model in half precision stay so wherever they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from verl.checkpoint import CheckpointManager, PartSettings, hf_folder
from verl.checkpoint.merge import MergeOptions, merge
from verl.config.schema import ActorConfig, ModelConfig
from verl.engines import build_engine
from verl.errors import CheckpointError
from verl.models.loading import cast_parameters
from verl.rollout.weight_sync.broadcast import load_into

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # a buffer
    "glm4_moe": (
        "model.layers.1.mlp.gate.e_score_correction_bias",
        {"head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1},
    ),
    # a parameter
    "ernie4_5_moe": (
        "model.layers.1.mlp.gate.weight",
        {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
         "moe_layer_end_index": 1, "moe_layer_interval": 1},
    ),
}  # fmt: skip


def make_model(architecture: str) -> Any:
    """In bfloat16, with numbers that bfloat16 cannot tell apart where float32 is kept."""
    kept, changes = MODELS[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SHAPE | changes)).float()
    cast_parameters(model, torch.bfloat16)
    weight = model.state_dict()[kept]
    weight.copy_(3.0 + 0.001 * torch.arange(weight.numel()).view(weight.shape))
    assert weight.dtype == torch.float32
    model.config.dtype = torch.bfloat16
    return model


def engine_of(folder: Path) -> Any:
    return build_engine(
        "actor", ModelConfig(path=str(folder), dtype="bfloat16"), ActorConfig(), device="cpu", total_steps=5
    )


@pytest.mark.parametrize("architecture", MODELS)
def test_saves_merges_and_syncs_keep_float32(tmp_path: Path, architecture: str) -> None:
    kept, model = MODELS[architecture][0], make_model(architecture)
    model.save_pretrained(tmp_path / "model")
    engine = engine_of(tmp_path / "model")
    expected = dict(model.state_dict())

    synced = dict(engine.weights().named_tensors("module"))
    engine.save_hf(tmp_path / "saved")
    settings = {"actor": PartSettings(["model", "hf_model"])}
    part = CheckpointManager(tmp_path / "run", settings).save(1, {"actor": engine}, {}) / "actor"
    merged = merge(MergeOptions(part, tmp_path / "merged"))
    found = {
        "sync": synced,
        "save": _loaded(tmp_path / "saved"),
        "checkpoint": _loaded(part / "huggingface"),
        "merge": _loaded(merged),
    }
    for way, weights in found.items():
        assert weights.keys() == expected.keys(), way
        for name, value in expected.items():
            assert weights[name].dtype == value.dtype and torch.equal(weights[name], value), (way, name)
    copy = make_model(architecture)
    copy.state_dict()[kept].zero_()
    load_into(copy, iter(synced.items()))  # what a separate native engine does
    assert torch.equal(copy.state_dict()[kept], expected[kept])


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


def test_a_merge_that_rounds_what_transformers_keeps_in_float32_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("glm4_moe").save_pretrained(tmp_path / "model")
    settings = {"actor": PartSettings(["model"])}
    manager = CheckpointManager(tmp_path / "run", settings)
    part = manager.save(1, {"actor": engine_of(tmp_path / "model")}, {}) / "actor"
    monkeypatch.setattr(hf_folder, "cast_to", lambda dtype, model: lambda name, weight: weight.to(dtype))
    with pytest.raises(CheckpointError, match="e_score_correction_bias' was rounded"):
        merge(MergeOptions(part, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_file_of_the_folder_has_the_type_too(tmp_path: Path) -> None:
    """Other programs read the file as it is."""
    kept, _ = MODELS["glm4_moe"]
    make_model("glm4_moe").save_pretrained(tmp_path / "model")
    engine_of(tmp_path / "model").save_hf(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    stored = load_file(file)
    assert stored[kept].dtype == torch.float32
    assert stored["model.norm.weight"].dtype == torch.bfloat16
