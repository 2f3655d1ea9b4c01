"""What leaves the trainer is the model that was trained: saves, resumes, syncs, merged adapters and critics of many
architectures, with transposed, joined, tied, float32 and buffered weights among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.merge import MergeOptions, merge
from verl.checkpoint.weights import same_bits
from verl.config.schema import ActorConfig, CriticConfig, ModelConfig, RefConfig
from verl.data.proto import DataProto
from verl.engines import build_engine

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "mixtral", "qwen2_moe",
    "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "cohere2", "granite", "olmo2", "olmo3",
    "starcoder2", "stablelm", "smollm3", "exaone4", "llama4_text", "ministral", "ministral3", "glm4", "nemotron",
    "hunyuan_v1_dense", "seed_oss", "ernie4_5", "arcee", "lfm2", "minimax", "apertus", "helium", "diffllama", "dots1",
    "gpt2", "opt", "gpt_neox", "falcon", "bloom", "gptj", "qwen3_next",
)  # fmt: skip
VOCAB = 120


def swept(*always: str) -> Any:
    """All architectures; those not named are for `make test-extended`."""
    marks = {name: () if name in always else (pytest.mark.extended,) for name in ARCHITECTURES}
    return pytest.mark.parametrize(
        "architecture", [pytest.param(name, marks=marks[name]) for name in ARCHITECTURES]
    )


@pytest.fixture
def folder(build_architecture: Any, architecture: str, tmp_path: Path) -> Path:
    build_architecture(architecture).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def engine_of(kind: str, folder: Path, dtype: str = "float32", **model: Any) -> Any:
    role = {"actor": ActorConfig, "critic": CriticConfig, "ref": RefConfig}[kind]()
    if kind != "ref":
        role.optim.lr = 1e-2
        role.ppo_micro_batch_size_per_gpu = 2
    config = ModelConfig(path=str(folder), dtype=dtype, **model)
    return build_engine(kind, config, role, device="cpu", total_steps=None if kind == "ref" else 5)


def batch() -> DataProto:
    ids = torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(0))
    attended, wanted = torch.ones_like(ids), torch.ones(2, 9, dtype=torch.long)
    attended[0, :3], attended[1, -4:], wanted[1, -4:] = 0, 0, 0
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": attended, "response_mask": wanted}
    )


def loss(output: Any, micro: DataProto) -> Any:
    values = output.log_probs if output.log_probs is not None else (output.values - 1).square()
    return -0.01 * (values * micro.batch["response_mask"]).sum(), {}


def saved(engine: Any, run: Path, contents: list[str], part: str = "actor") -> Path:
    manager = CheckpointManager(run, {part: PartSettings(contents)})
    manager.rehearse({part: engine}, {})
    step = manager.save(1, {part: engine}, {})
    assert step is not None, manager.failure
    return step / part


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}.{key}")
    else:
        yield path, state


def equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else bool(x == y)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.eval()
    found: torch.Tensor = model(input_ids=batch().batch["input_ids"][:1], use_cache=False).logits
    return found


@pytest.mark.slow(seconds=2)
@swept("gpt2", "glm4_moe", "gemma2")
def test_a_saved_resumed_or_synced_policy_is_the_trained_one(folder: Path, tmp_path: Path) -> None:
    engine = engine_of("actor", folder, "bfloat16")
    engine.forward_backward(batch(), loss)
    engine.optimizer_step()
    part = saved(engine, tmp_path / "run", ["model", "optimizer", "extra", "hf_model"])
    model = AutoModelForCausalLM.from_pretrained(part / "huggingface")
    trained, state = dict(engine.weights().named_tensors("module")), model.state_dict()
    assert trained.keys() == state.keys()
    assert [name for name in state if not same_bits(state[name], trained[name])] == []

    again = engine_of("actor", folder, "bfloat16")
    CheckpointManager(tmp_path / "run", {}).resume({"actor": again})
    pairs = list(zip(leaves(engine.state()), leaves(again.state()), strict=True))
    assert [name for (name, x), (_, y) in pairs if not equal(x, y)] == []

    synced, stored = dict(engine.weights().named_tensors()), files(part / "huggingface")
    assert [name for name in stored if not same_bits(stored[name], synced[name])] == []
    engine.save_hf(tmp_path / "saved")
    whole = files(tmp_path / "saved")
    assert whole.keys() == stored.keys() and all(same_bits(whole[name], stored[name]) for name in whole)
    with engine.weights().module() as module:
        module.set_attn_implementation(model.config._attn_implementation)
        assert torch.equal(logits(module), logits(model))


@swept("qwen3_moe")
def test_an_adapter_that_is_merged_answers_like_the_trained_policy(folder: Path, tmp_path: Path) -> None:
    engine = engine_of("actor", folder, lora_rank=2, lora_alpha=4)
    with engine.weights().structure() as module:
        for name, param in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, 0, 0.1)
    answers = engine.log_probs(batch())["log_probs"]
    before = engine_of("ref", folder).log_probs(batch())["log_probs"]
    assert (answers - before).abs().max() > 1e-2
    engine.save_hf(tmp_path / "saved")
    part = saved(engine, tmp_path / "run", ["model"])
    merged = merge(MergeOptions(part, tmp_path / "merged", base_dir=folder))
    for target in (tmp_path / "saved", merged):
        found = engine_of("ref", target).log_probs(batch())["log_probs"]
        torch.testing.assert_close(found, answers, rtol=1e-4, atol=1e-4)


@swept("gpt2", "falcon", "gemma3_text")
def test_a_critic_is_saved_and_opened_again(architecture: str, folder: Path, tmp_path: Path) -> None:
    engine = engine_of("critic", folder)
    for _ in range(2):
        engine.forward_backward(batch(), loss)
        engine.optimizer_step()
    values = engine.values(batch())
    assert values.abs().max() > 1e-3
    part = saved(engine, tmp_path / "run", ["model", "hf_model"], "critic")
    merged = merge(MergeOptions(part, tmp_path / "merged", is_value_model=True))
    for target in (part / "huggingface", merged):
        assert torch.equal(engine_of("critic", target).values(batch()), values)
    config = AutoConfig.from_pretrained(merged)
    assert config.architectures[0].endswith("ForTokenClassification")
    if type(config) not in AutoModelForTokenClassification._model_mapping:  # we alone open it
        assert architecture not in ("gpt2", "gpt_neox", "falcon", "bloom", "llama")
        return
    model, info = AutoModelForTokenClassification.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        found = model.eval()(input_ids=batch().batch["input_ids"][1:]).logits[0, 4:9, 0]
    torch.testing.assert_close(found, values[1, :5], rtol=1e-4, atol=1e-4)
