"""Policies and critics of many architectures through a checkpoint; configs that transformers refuses to save."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.rollout.tiny_architectures import build_architecture
from verl.checkpoint.manager import CheckpointManager, PartSettings
from verl.checkpoint.merge import MergeOptions, merge
from verl.config.schema import ActorConfig, CriticConfig, ModelConfig
from verl.engines import build_engine

EVERYTHING = ["model", "optimizer", "extra", "hf_model"]
FIRST = ("gpt2", "falcon", "gemma3_text")
SWEEP = (
    *(
        "llama",
        "mistral",
        "ministral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma2",
    ),
    *(
        "gemma3_text",
        "phi",
        "phi3",
        "gpt_neo",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "glm",
        "glm4",
        "glm4_moe",
    ),
    *(
        "cohere",
        "cohere2",
        "granite",
        "olmo",
        "olmo2",
        "olmo3",
        "starcoder2",
        "stablelm",
        "smollm3",
        "exaone4",
    ),
    *(
        "llama4_text",
        "nemotron",
        "seed_oss",
        "ernie4_5",
        "arcee",
        "apertus",
        "helium",
        "dots1",
        "gpt2",
        "opt",
    ),
    *("gpt_neox", "falcon", "bloom", "gptj"),
)


NOT_ALL_LINEAR = ("deepseek_v2", "deepseek_v3", "glm4_moe", "llama4_text", "dots1", "gpt2")
"""Models that the default `target_modules` do not fit; they are refused at start."""


def some_now(first: tuple[str, ...]) -> list[Any]:
    return [name if name in first else pytest.param(name, marks=pytest.mark.extended) for name in SWEEP]


def build(kind: str, path: Path, rank: int = 0) -> Any:
    role = CriticConfig() if kind == "critic" else ActorConfig()
    role.ppo_micro_batch_size_per_gpu = 2
    role.optim.lr = 1e-2
    model = ModelConfig(path=str(path), dtype="float32", lora_rank=rank)
    return build_engine(kind, model, role, device="cpu", total_steps=9, seed=0)


def saved(engine: Any, run: Path) -> Path:
    manager = CheckpointManager(run, {"actor": PartSettings(EVERYTHING)})
    manager.rehearse({"actor": engine}, {})
    folder = manager.save(1, {"actor": engine}, {"step": 1})
    assert folder is not None, manager.failure
    return folder


@pytest.fixture
def source(architecture: str, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    build_architecture(architecture).float().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("architecture", some_now(FIRST))
def test_a_critic_is_saved_and_opened_again(
    architecture: str, source: Path, tmp_path: Path, job: ModuleType
) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    engine = build("critic", source)
    job.train(engine, 1)
    batch = job.make_batch(2)
    values = engine.values(batch)
    assert values.abs().max() > 0
    folder = saved(engine, tmp_path / "run")
    merge(MergeOptions(folder / "actor", tmp_path / "merged"))
    for opened in (folder / "actor" / "huggingface", tmp_path / "merged"):
        assert torch.equal(build("critic", opened).values(batch), values)
    config = AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.architectures[0].endswith("ForTokenClassification")
    if type(config) not in AutoModelForTokenClassification._model_mapping:  # we alone open it
        assert architecture not in ("gpt2", "gpt_neo", "gpt_neox", "falcon", "bloom", "llama")
        return
    model, info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"]
    with torch.no_grad():
        logits = model.eval()(input_ids=batch.batch["input_ids"][1:2]).logits
    assert torch.allclose(logits[0, 3:8, 0], values[1], atol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("architecture", "rank"),
    [(name, rank) for name in SWEEP for rank in (0, 2) if rank == 0 or name not in NOT_ALL_LINEAR],
)
def test_a_policy_is_saved_resumed_and_given_to_rollout_engines(
    architecture: str, rank: int, source: Path, tmp_path: Path, job: ModuleType
) -> None:
    from transformers import AutoModelForCausalLM

    engine = build("actor", source, rank)
    job.train(engine, 1)
    batch = job.make_batch(2)
    expected = engine.log_probs(batch)["log_probs"]
    folder = saved(engine, tmp_path / "run")
    fresh = build("actor", source, rank)
    CheckpointManager(tmp_path / "run").resume({"actor": fresh})
    assert torch.equal(fresh.log_probs(batch)["log_probs"], expected)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder / "actor" / "huggingface", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = batch.batch["input_ids"][1:2]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0].log_softmax(-1)
    assert torch.allclose(logits[3:8].gather(-1, ids[0, 4:9, None])[:, 0], expected[1], atol=1e-4)
    for name, sent in engine.weights().named_tensors("module"):
        assert torch.equal(sent, model.state_dict()[name]), name


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
    folder = saved(job.make_engine(model=model, lora_rank=rank), tmp_path / "run")
    found = json.loads((folder / "actor/huggingface/generation_config.json").read_text())
    assert wrong.items() <= found.items()
    if not rank:
        merge(MergeOptions(folder / "actor", tmp_path / "merged"))
        assert wrong.items() <= json.loads((tmp_path / "merged/generation_config.json").read_text()).items()


def test_a_config_with_keys_of_generation_is_saved(tmp_path: Path, job: ModuleType) -> None:
    model = job.make_model()
    model.config.temperature = 0.7
    with pytest.raises(ValueError):
        model.config.save_pretrained(tmp_path)
    saved(job.make_engine(model=model), tmp_path / "run")


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_the_saved_config_has_the_dropout_the_model_came_with(
    kind: str, tmp_path: Path, job: ModuleType
) -> None:
    engine = job.make_engine(kind, model=job.make_model(attention_dropout=0.25))
    with engine.weights().structure() as model:
        assert model.config.attention_dropout == 0
    engine.save_hf_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_dropout"] == 0.25
