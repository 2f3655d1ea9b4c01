"""The model passed to the Python API is trained in place and works as before afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl import GRPOTrainer
from verl.trainer import TrainingConfig


def reward(prompt: str, response: str) -> float:
    return float("1" in response.split())


@pytest.fixture
def model(tiny_model_dir: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


def train(model, tokenizer, folder: Path, **more):
    config = TrainingConfig(
        batch_size=8,
        n=4,
        max_response_length=4,
        learning_rate=1e-2,
        device="cpu",
        output_dir=str(folder),
        **more,
    )
    return GRPOTrainer(model, tokenizer, config, reward_function=reward).train([["repeat 1"] * 8])


@pytest.mark.slow
def test_a_trained_model_generates_and_trains_again(model, tiny_tokenizer, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    prompt = tiny_tokenizer("repeat 1", return_tensors="pt")
    for number in range(2):
        train(model, tiny_tokenizer, tmp_path / str(number))
        assert model.config._attn_implementation == attention and not model.training
        prompt.pop("token_type_ids", None)
        assert model.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape[1] == 4
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_whose_training_failed_is_restored(model, tiny_tokenizer, tmp_path: Path) -> None:
    attention = model.config._attn_implementation
    with pytest.raises(Exception, match="no score"):
        GRPOTrainer(
            model,
            tiny_tokenizer,
            TrainingConfig(batch_size=8, n=2, max_response_length=4, device="cpu", output_dir=str(tmp_path)),
            reward_function=lambda response: None,
        ).train([["repeat 1"] * 8])
    assert model.config._attn_implementation == attention


def test_a_run_repeated_under_another_name_has_another_folder(
    overrides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    first = [line for line in overrides("trainer.total_training_steps=1") if "default_local_dir" not in line]
    done = run(load_ppo_config([*first, "trainer.experiment_name=one"]))
    assert done.folder == tmp_path / "checkpoints" / "verl" / "one"
    again = run(
        load_ppo_config(["--config-path", str(done.folder / "config.yaml"), "trainer.experiment_name=two"])
    )
    assert again.folder == tmp_path / "checkpoints" / "verl" / "two" and again.steps == 1
    assert "resumed" not in caplog.text and "other settings" not in caplog.text
    assert again.metrics["reward/mean"] == done.metrics["reward/mean"]
    same = run(load_ppo_config(["--config-path", str(done.folder / "config.yaml")]))
    assert same.folder == done.folder and "other settings" not in caplog.text
