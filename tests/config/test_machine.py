"""Processes a machine has no place for: refused by the values alone, before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from verl import requirements
from verl.config import machine as devices
from verl.config.load import from_dict
from verl.config.machine import Device, attention_errors, machine_errors, parse_gpus
from verl.config.schema import GenerationConfig, PPOConfig, SFTConfig

CPU = Device("cpu", "CPU", 2**33, 1)
FOUR = Device("cuda", "H200", 2**37, 4)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "WORLD_SIZE", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def ppo(**more: Any) -> PPOConfig:
    names = {name.replace("__", "."): value for name, value in more.items()}
    return from_dict(PPOConfig, {"actor_rollout_ref.model.path": "m/m", "data.train_files": "o/d", **names})


def test_more_nodes_than_this_one_need_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = ppo(trainer__nnodes=4, trainer__n_gpus_per_node=8)
    (line,) = machine_errors(cfg, FOUR)
    assert "'trainer.nnodes' is 4" in line and "RAY_ADDRESS" in line and "trainer.nnodes=1" in line
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Ray is installed
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert machine_errors(cfg, FOUR) == []  # `ray start` was here: the cluster says what it has
    assert machine_errors(cfg, FOUR), "and has ended"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert machine_errors(cfg, FOUR)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert machine_errors(cfg, FOUR) == []


def test_gpus_that_are_not_there_are_counted() -> None:
    (line,) = machine_errors(ppo(trainer__n_gpus_per_node=8), FOUR)
    assert "trainer.n_gpus_per_node=8" in line and "this machine has 4 GPUs" in line
    assert machine_errors(ppo(trainer__n_gpus_per_node=4), FOUR) == []
    own = {"reward__reward_model": {"enable": True, "model_path": "m/r", "nnodes": 1, "n_gpus_per_node": 2}}
    (line,) = machine_errors(ppo(trainer__n_gpus_per_node=3, **own), FOUR)
    assert "5 GPUs are asked for" in line and "reward.reward_model.n_gpus_per_node" in line


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_machine_without_gpu_is_called_that(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", list)
    (line,) = machine_errors(ppo(trainer__n_gpus_per_node=4, trainer__device=device))
    assert "there is no GPU on this machine" in line and "trainer.device=cpu" in line


def test_cpu_processes_are_asked_for_by_name() -> None:
    assert machine_errors(ppo(trainer__n_gpus_per_node=4, trainer__device="cpu"), CPU) == []
    assert machine_errors(ppo(), CPU) == []


def test_generating_and_fine_tuning_are_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = {"model.path": "m/m", "data.path": "a.jsonl", "data.output_path": "b.jsonl"}
    cfg = from_dict(GenerationConfig, {**generation, "trainer.n_gpus_per_node": 2})
    assert "no GPU" in machine_errors(cfg, CPU)[0]
    sizes = {"trainer.n_gpus_per_node": 2, "trainer.nnodes": 2}
    sft = from_dict(SFTConfig, {"model.path": "m/m", "data.train_files": "o/d", **sizes})
    assert "'trainer.nnodes' is 2" in machine_errors(sft, FOUR)[0]
    monkeypatch.setenv("WORLD_SIZE", "4")  # torchrun has its own nodes
    assert machine_errors(sft, FOUR) == []


def test_parts_of_a_gpu_count_as_many_as_are_named() -> None:
    listed = "0, NVIDIA H100, 81559"
    assert len(parse_gpus(listed, "MIG-11-aa,MIG-11-bb")) == 2
    assert len(parse_gpus(listed, "GPU-1234")) == 1


def test_kernels_of_attention_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "attention_package_installed", lambda name: name == "cudnn")
    key = "actor_rollout_ref__model__attention_backend"
    for name in ("auto", "sdpa", "varlen", "flex", "cudnn"):
        assert attention_errors(ppo(**{key: name}), FOUR) == []
    assert attention_errors(ppo(**{key: "sdpa"}), CPU) == []
    (line,) = attention_errors(ppo(**{key: "varlen"}), CPU)
    assert "'actor_rollout_ref.model.attention_backend' is varlen" in line and "CPUs" in line
    (line,) = attention_errors(ppo(**{key: "fa4"}), FOUR)
    assert "flash-attn-4 is not installed (pip install 'flash-attn-4" in line
    dtype = {"actor_rollout_ref__model__dtype": "float32"}
    (line,) = attention_errors(ppo(**{key: "cudnn"}, **dtype), FOUR)
    assert "no float32" in line and "actor_rollout_ref.model.dtype=bfloat16" in line
    tuned = from_dict(
        SFTConfig, {"model.path": "m/m", "data.train_files": "o/d", "model.attention_backend": "fa4"}
    )
    assert attention_errors(tuned, FOUR)[0].startswith("'model.attention_backend' is fa4")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("flash_attention_2", "varlen"), ("flash_attention_3", "fa4"), ("sdpa", "sdpa"), ("eager", "sdpa"),
     ("flex_attention", "flex")],
)  # fmt: skip
def test_attn_implementation_is_another_name(theirs: str, ours: str) -> None:
    for name in ("attn_implementation", "override_config.attn_implementation", "attention_backend"):
        config = ppo(**{f"actor_rollout_ref.model.{name}": theirs})
        assert config.actor_rollout_ref.model.attention_backend == ours
        assert config.actor_rollout_ref.model.override_config == {}
        assert config.critic.model.attention_backend == ours, "the same model"
        tuned = from_dict(
            SFTConfig, {"model.path": "m/m", "data.train_files": "o/d", f"model.{name}": theirs}
        )
        assert tuned.model.attention_backend == ours
