"""What a command refuses in its first seconds: all of it at once, each with its key."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import from_dict
from verl.config.machine import missing_packages, needed_packages
from verl.config.plan import RunPlan
from verl.config.schema import PPOConfig, SFTConfig
from verl.errors import ConfigError
from verl.trainer.preflight import preflight, require_disk


def ppo(model: Path | str, data: Path | str, **more: Any) -> PPOConfig:
    names = {name.replace("__", "."): value for name, value in more.items()}
    return from_dict(
        PPOConfig, {"actor_rollout_ref.model.path": str(model), "data.train_files": str(data), **names}
    )


def test_what_is_all_there_passes(tiny_model_dir: Path, digits_data: Path) -> None:
    preflight(
        ppo(
            tiny_model_dir,
            digits_data / "train.jsonl",
            data__max_prompt_length=8,
            data__max_response_length=8,
        )
    )


def test_a_layout_that_does_not_fit_the_model_is_refused(tiny_model_dir: Path, digits_data: Path) -> None:
    layout = {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 3}
    cfg = ppo(
        tiny_model_dir,
        digits_data / "train.jsonl",
        trainer__n_gpus_per_node=3,
        trainer__device="cpu",
        **layout,
    )
    with pytest.raises(ConfigError, match=r"is 3, which does not divide the model's 4 attention heads"):
        preflight(cfg)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Online by the variables, with nothing behind the hub's address and nothing in its cache."""
    for name in ("TRANSFORMERS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        yield


def test_a_model_of_a_hub_that_cannot_be_reached_is_refused_at_once(no_hub: None, digits_data: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path: .*some/model.*refused") as error:
        preflight(ppo("some/model", digits_data / "train.jsonl"))
    assert len(str(error.value).splitlines()) == 1


def test_a_cached_model_is_taken_without_asking_the_hub_again(
    no_hub: None, digits_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    preflight(ppo("some/model", digits_data / "train.jsonl"))
    assert os.environ["HF_HUB_OFFLINE"] == "1" and "models are taken from the cache" in caplog.text


def test_a_disk_too_small_for_one_checkpoint_is_refused_before_training(
    tiny_model_dir: Path, digits_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.config.plan.free_bytes", lambda folder: 600_000)
    data = digits_data / "train.jsonl"
    with pytest.raises(
        ConfigError, match=r"trainer.default_local_dir=.*a checkpoint takes about .* are free"
    ):
        preflight(ppo(tiny_model_dir, data))
    sft = {"model.path": str(tiny_model_dir), "data.train_files": str(data)}
    with pytest.raises(ConfigError, match=r"checkpoint.save_contents"):
        preflight(from_dict(SFTConfig, sft))
    preflight(ppo(tiny_model_dir, data, trainer__val_only=True, data__val_files=str(data)))


def test_a_disk_too_small_for_what_is_planned_is_warned_of(
    tiny_model_dir: Path,
    digits_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("verl.config.plan.free_bytes", lambda folder: 5_000_000)
    cfg = ppo(tiny_model_dir, digits_data / "train.jsonl", trainer__save_freq=1)
    require_disk(RunPlan(cfg), tmp_path, 100)
    assert "100 checkpoints of about" in caplog.text and "trainer.max_actor_ckpt_to_keep=" in caplog.text
    monkeypatch.setattr("verl.config.plan.free_bytes", lambda folder: 600_000)
    given = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(ConfigError, match="trainer.default_local_dir"):
        require_disk(RunPlan(ppo("SomeModel", "o/d"), model=given), tmp_path, 1)


def test_everything_that_is_missing_is_said_at_once(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "wandb"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    cfg = ppo(
        "/nowhere/model",
        "/nowhere/train.parquet",
        data__val_files=["/nowhere/val.jsonl"],
        actor_rollout_ref__rollout__name="vllm",
        trainer__logger=["console", "wandb"],
        critic__model__path="/nowhere/critic",
        reward__reward_model={"enable": True, "model_path": "/nowhere/reward"},
    )
    with pytest.raises(ConfigError) as caught:
        preflight(cfg)
    lines = str(caught.value).splitlines()
    for word in (
        "pip install 'vllm>=",
        "pip install 'wandb>=",
        "data.train_files: /nowhere/train.parquet does not exist",
        "data.val_files: /nowhere/val.jsonl does not exist",
        "actor_rollout_ref.model.path: there is no model folder '/nowhere/model'",
        "critic.model.path: there is no model folder '/nowhere/critic'",
        "reward.reward_model.model_path: there is no model folder '/nowhere/reward'",
    ):
        assert sum(word in line for line in lines) == 1, word
    assert len(lines) == 7


def test_the_models_of_the_algorithm_are_looked_at(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    keys: dict[str, Any] = {
        "implicit_reward__model__path": "/nowhere/reward",
        "actor_rollout_ref__rollout__n": 2,
    }
    preflight(ppo(tiny_model_dir, tmp_path / "train.jsonl", **keys, algorithm__adv_estimator="rloo"))
    with pytest.raises(ConfigError) as caught:
        preflight(ppo(tiny_model_dir, tmp_path / "train.jsonl", **keys, algorithm__adv_estimator="prime"))
    assert str(caught.value).startswith(
        "implicit_reward.model.path: there is no model folder '/nowhere/reward'"
    )
    assert len(str(caught.value).splitlines()) == 1


def test_mixtures_and_fine_tuning_are_looked_at_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    cfg = ppo(tiny_model_dir, "")
    cfg.data.train_files = []
    cfg.data.mixture = from_dict(
        PPOConfig, {"data.mixture": [{"files": ["/nowhere/a.jsonl"], "weight": 1.0}]}, checked=False
    ).data.mixture
    with pytest.raises(ConfigError, match=r"data.mixture\[0\].files: /nowhere/a.jsonl"):
        preflight(cfg)
    sft = from_dict(SFTConfig, {"model.path": "/nowhere/m", "data.train_files": str(tmp_path / "no.jsonl")})
    with pytest.raises(
        ConfigError, match=r"data.train_files.*\nmodel.path: there is no model folder '/nowhere/m'"
    ):
        preflight(sft)


def test_given_objects_are_not_looked_for() -> None:
    preflight(ppo("/nowhere/model", "/nowhere/train.parquet"), given_model=True, given_data=True)


def test_ids_and_patterns_are_left_to_those_who_read_them(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight(ppo(tiny_model_dir, "org/data"))
    preflight(ppo(tiny_model_dir, "/nowhere/*.parquet"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("verl.trainer.preflight.hub_error", lambda *_: None)  # the hub is there
    preflight(ppo("org/model", "org/data"))


def test_sequences_longer_than_the_model_was_built_for(
    tiny_model_dir: Path, digits_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    data = digits_data / "train.jsonl"
    preflight(ppo(tiny_model_dir, data, data__max_prompt_length=200, data__max_response_length=56))
    assert "max_position_embeddings" not in caplog.text
    preflight(ppo(tiny_model_dir, data, data__max_prompt_length=200, data__max_response_length=57))
    assert (
        "data.max_prompt_length + data.max_response_length = 257" in caplog.text
        and "supports 256" in caplog.text
    )


@pytest.mark.parametrize(
    ("values", "package", "why"),
    [
        ({"trainer.logger": ["tensorboard"]}, "tensorboard", "trainer.logger=tensorboard"),
        ({"actor_rollout_ref.rollout.name": "sglang"}, "sglang", "rollout.name=sglang"),
        ({"trainer.n_gpus_per_node": 2}, "ray", "trainer.n_gpus_per_node=2"),
        ({"actor_rollout_ref.model.lora_rank": 4}, "peft", "actor_rollout_ref.model.lora_rank=4"),
        (
            {"actor_rollout_ref.rollout.n_gpus_per_node": 1, "actor_rollout_ref.rollout.nnodes": 1},
            "ray",
            "rollout.n_gpus_per_node=1",
        ),
        (
            {
                "reward.reward_model.enable": True,
                "reward.reward_model.model_path": "o/r",
                "reward.reward_model.n_gpus_per_node": 1,
                "reward.reward_model.nnodes": 1,
            },
            "ray",
            "reward_model.n_gpus_per_node=1",
        ),
    ],
)
def test_a_package_is_named_with_the_setting_that_needs_it(
    values: dict[str, Any], package: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"actor_rollout_ref.model.path": "o/m", "data.train_files": "o/d"}
    assert needed_packages(from_dict(PPOConfig, base)) == {}
    monkeypatch.setitem(__import__("sys").modules, package, None)
    lines = missing_packages(from_dict(PPOConfig, {**base, **values}))
    assert len(lines) == 1 and why in lines[0]
    assert f"pip install '{package}" in lines[0] and "verl[" not in lines[0]
