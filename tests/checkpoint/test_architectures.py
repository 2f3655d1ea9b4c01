"""Critics of every architecture, and configurations that transformers refuses to save."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from verl.checkpoint.manager import CheckpointManager, PartSettings
from verl.checkpoint.merge import MergeOptions, merge
from verl.config.schema import CriticConfig, ModelConfig
from verl.engines import build_engine

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1}
OPENED_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT,
    "gpt_neox": {**SIZES, "intermediate_size": 24},
    "falcon": {**SIZES, "new_decoder_architecture": False},
    "bloom": {**SIZES, "n_layer": 2, "n_head": 2},
    "mixtral": {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1},
}
OPENED_BY_US: dict[str, dict[str, Any]] = {
    "gemma3_text": {**LLAMA, "head_dim": 8},
    "cohere2": LLAMA,
    "opt": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "gptj": {**GPT, "rotary_dim": 4},
}
EVERYTHING = ["model", "optimizer", "extra", "hf_model"]


def critic(path: Path) -> Any:
    role = CriticConfig(ppo_micro_batch_size_per_gpu=2)
    role.optim.lr = 1e-2
    return build_engine("critic", ModelConfig(path=str(path)), role, device="cpu", total_steps=9)


FIRST = ("gpt2", "falcon", "gemma3_text")


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.extended)
        for name in (*OPENED_BY_TRANSFORMERS, *OPENED_BY_US)
    ],
)
def test_a_critic_is_saved_and_opened_again(architecture: str, tmp_path: Path, job: ModuleType) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    torch.manual_seed(0)
    sizes = (OPENED_BY_TRANSFORMERS | OPENED_BY_US)[architecture]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    model.save_pretrained(tmp_path / "model")
    engine = critic(tmp_path / "model")
    job.train(engine, 1)
    batch = job.make_batch(2)
    values = engine.values(batch)
    assert values.abs().max() > 0
    manager = CheckpointManager(tmp_path / "run", {"critic": PartSettings(EVERYTHING)})
    saved = manager.save(1, {"critic": engine}, {"step": 1})
    assert saved is not None, manager.failure
    merge(MergeOptions(saved / "critic", tmp_path / "merged"))
    for folder in (saved / "critic" / "huggingface", tmp_path / "merged"):
        assert torch.equal(critic(folder).values(batch), values)
    if architecture in OPENED_BY_US:
        return
    opened, info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"]
    with torch.no_grad():
        logits = opened.eval()(input_ids=batch.batch["input_ids"][1:2]).logits
    assert torch.allclose(logits[0, 3:8, 0], values[1], atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "rank"), [({"temperature": 0.9, "top_p": 0.6}, 0), ({"pad_token_id": -1}, 2)], ids=str
)
def test_a_generation_config_that_transformers_calls_invalid_is_saved_as_it_is(
    wrong: dict[str, Any], rank: int, tmp_path: Path, job: ModuleType
) -> None:
    model = job.make_model()
    for name, value in wrong.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError):
        model.generation_config.save_pretrained(tmp_path)
    engine = job.make_engine(model=model, lora_rank=rank)
    manager = CheckpointManager(tmp_path / "run", {"actor": PartSettings(EVERYTHING)})
    saved = manager.save(1, {"actor": engine}, {"step": 1})
    assert saved is not None, manager.failure
    assert (
        wrong.items() <= json.loads((saved / "actor/huggingface/generation_config.json").read_text()).items()
    )
    if not rank:
        merge(MergeOptions(saved / "actor", tmp_path / "merged"))
        assert wrong.items() <= json.loads((tmp_path / "merged/generation_config.json").read_text()).items()


def test_a_config_with_keys_of_generation_is_saved(tmp_path: Path, job: ModuleType) -> None:
    model = job.make_model()
    model.config.temperature = 0.7
    with pytest.raises(ValueError):
        model.config.save_pretrained(tmp_path)
    manager = CheckpointManager(tmp_path / "run", {"actor": PartSettings(EVERYTHING)})
    saved = manager.save(1, {"actor": job.make_engine(model=model)}, {"step": 1})
    assert saved is not None, manager.failure


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_the_saved_config_has_the_dropout_the_model_came_with(
    kind: str, tmp_path: Path, job: ModuleType
) -> None:
    engine = job.make_engine(kind, model=job.make_model(attention_dropout=0.25))
    assert engine.weights()._model.config.attention_dropout == 0
    engine.save_hf_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_dropout"] == 0.25
