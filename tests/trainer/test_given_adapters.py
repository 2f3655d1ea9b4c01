"""Models of peft handed to the Python API: their adapters are trained and saved like those of `lora_rank`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from verl import GRPOTrainer, PPOTrainer, Session
from verl.errors import ConfigError
from verl.trainer import TrainingConfig
from verl.workers import TrainerWorker

LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


def with_adapter(folder: Path, config: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(model, config or LoraConfig(**{**LORA, "lora_dropout": 0.1, **more}))


def settings(folder: Path, **overrides: Any) -> TrainingConfig:
    return TrainingConfig(
        batch_size=2,
        n=2,
        max_prompt_length=16,
        max_response_length=2,
        learning_rate=1e-2,
        device="cpu",
        output_dir=str(folder / "run"),
        overrides={"trainer.logger": [], "reward.in_process": True, **overrides},
    )


def reward(response: str) -> float:
    return float(len(response))


@pytest.mark.parametrize("trainer", [GRPOTrainer, PPOTrainer])
def test_the_adapters_of_a_model_of_peft_are_trained_and_saved(
    trainer: Any, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = with_adapter(tiny_model_dir)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    made = trainer(model, tiny_tokenizer, settings(tmp_path), reward_function=reward)
    result = made.train([["repeat 1", "repeat 2"]])
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert changed and changed <= trained
    assert {name for name, param in model.named_parameters() if param.requires_grad} == trained
    actor = result.folder / "global_step_1" / "actor"
    saved = json.loads((actor / "lora_adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], set(saved["target_modules"])) == (4, 6, {"q_proj", "v_proj"})
    opened = AutoModelForCausalLM.from_pretrained(actor / "huggingface")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        own = model.eval()(input_ids=ids).logits  # through peft's own forward
        assert torch.allclose(opened(input_ids=ids).logits, own, atol=1e-5)
        with model.disable_adapter():
            assert not torch.allclose(model(input_ids=ids).logits, own, atol=1e-5)


def test_a_session_trains_the_adapters_it_was_given(tiny_model_dir: Path, tiny_tokenizer: Any) -> None:
    model = with_adapter(tiny_model_dir)
    with Session(model, tokenizer=tiny_tokenizer, device="cpu") as session:
        assert session.cfg.actor_rollout_ref.model.lora_rank == 4
        names = set(session._group.actor_engine.state()["model"])
    assert names and all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in names)
    with pytest.raises(ConfigError, match="lora_rank=4, but .*lora_rank=8"):
        Session(model, tokenizer=tiny_tokenizer, device="cpu", lora_rank=8)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "kind PROMPT_TUNING"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "kind IA3"),
        (LoraConfig(**LORA, use_dora=True), "use_dora=True"),
        (LoraConfig(**LORA, modules_to_save=["lm_head"]), "modules_to_save=.*lm_head"),
        (LoraConfig(**LORA, bias="all"), "bias='all'"),
        (LoraConfig(**LORA, init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (LoraConfig(**{**LORA, "target_modules": ["embed_tokens"]}), "is on a Embedding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_adapters_that_cannot_be_trained_are_refused_at_start(
    config: Any, says: str, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = with_adapter(tiny_model_dir, config)
    with pytest.raises(ConfigError, match=says):
        GRPOTrainer(model, tiny_tokenizer, settings(tmp_path), reward_function=reward)


def test_another_adapter_besides_is_refused(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = with_adapter(tiny_model_dir)
    with pytest.raises(ConfigError, match="lora_rank=4, but actor_rollout_ref.model.lora_rank=8"):
        GRPOTrainer(
            model, tiny_tokenizer, settings(tmp_path, **{"actor_rollout_ref.model.lora_rank": 8}), reward
        )
    model.add_adapter("second", LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="the adapters default, second"):
        TrainerWorker(model)
