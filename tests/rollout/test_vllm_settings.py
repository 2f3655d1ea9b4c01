"""Our keys as vLLM's arguments, without vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.config.schema import RolloutConfig
from verl.errors import ConfigError, MissingPackage
from verl.rollout import external_engine
from verl.rollout.base import SamplingParams
from verl.rollout.server_engine import server_devices
from verl.rollout.source import ModelInfo, ModuleWeights, model_info
from verl.rollout.vllm.settings import (
    engine_arguments,
    log_probs_mode,
    sampling_arguments,
    set_environment,
)
from verl.runtime import environment

FOLDER = Path("/model")


def info_of(model: Any) -> ModelInfo:
    return model_info(ModuleWeights(model), None)


def section(**changes: Any) -> RolloutConfig:
    config = RolloutConfig(name="vllm")
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def test_versions_outside_the_range_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(version: str | None) -> str:
        monkeypatch.setattr(external_engine, "installed_version", lambda name: version)
        return external_engine.require_engine("vllm")

    monkeypatch.setattr(external_engine.util, "find_spec", lambda name: object())
    for good in ("0.24.0", "0.32.0", "0.32.1+cpu", "0.25.0rc1"):
        assert require(good) == good
    for bad in ("0.23.9", "0.33.0", "1.0", "0.3.2"):
        with pytest.raises(ConfigError, match=rf"vllm {bad} is installed, .* works with >=0.24,<0.33"):
            require(bad)
    with pytest.raises(MissingPackage, match=r"pip install 'vllm>="):
        require(None)


def test_the_model_is_described_without_its_weights(tiny: Callable[..., Any]) -> None:
    info = info_of(tiny("qwen2"))
    content = json.loads(info.config_json)
    assert content["architectures"] == ["Qwen2ForCausalLM"] and content["hidden_size"] == 32
    assert (info.vocab_size, info.eos_ids, info.dtype, info.device) == (97, {2}, "float32", "cpu")
    assert info.lora_rank == 0 and info.max_positions == 512


def test_keys_become_arguments(tiny: Callable[..., Any]) -> None:
    info = info_of(tiny("llama"))
    config = section(max_num_seqs=7, max_model_len=99, tensor_model_parallel_size=2, seed=5)
    config.engine_kwargs.vllm = {"disable_cascade_attn": True, "max_num_batched_tokens": 300}
    arguments = engine_arguments(config, info, FOLDER)
    expected = {
        "max_num_seqs": 7,
        "max_model_len": 99,
        "tensor_parallel_size": 2,
        "seed": 5,
        "dtype": "float32",
        "enforce_eager": True,  # no graphs on the CPU
        "disable_cascade_attn": True,
        "max_num_batched_tokens": 300,
        "load_format": "dummy",
    }
    assert {key: arguments[key] for key in expected} == expected
    assert "gpu_memory_utilization" not in arguments and "enable_lora" not in arguments
    assert engine_arguments(section(), info, FOLDER)["max_num_batched_tokens"] == 8192
    assert engine_arguments(section(max_num_batched_tokens=8), info, FOLDER)["max_num_batched_tokens"] == 1024


def test_keys_for_a_gpu(tiny: Callable[..., Any]) -> None:
    from dataclasses import replace

    info = replace(info_of(tiny("llama")), device="cuda", dtype="bfloat16", lora_rank=24)
    arguments = engine_arguments(section(gpu_memory_utilization=0.4, enforce_eager=False), info, FOLDER)
    assert arguments["gpu_memory_utilization"] == 0.4 and arguments["enable_sleep_mode"] is True
    assert arguments["enforce_eager"] is False and arguments["dtype"] == "bfloat16"
    assert arguments["max_lora_rank"] == 32 and arguments["enable_lora"] is True
    assert "quantization" not in arguments
    fp8 = engine_arguments(section(dtype="fp8", free_cache_engine=False), info, FOLDER)
    assert fp8["quantization"] == "fp8" and fp8["dtype"] == "bfloat16" and fp8["enable_sleep_mode"] is False
    assert engine_arguments(section(dtype="float16"), info, FOLDER)["dtype"] == "float16"
    with pytest.raises(ConfigError, match="lora_rank is 1024"):
        engine_arguments(section(), replace(info, lora_rank=1024), FOLDER)


def test_what_the_hand_over_stands_on_cannot_be_overridden(tiny: Callable[..., Any]) -> None:
    config = section()
    config.engine_kwargs.vllm = {"load_format": "auto"}
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm.load_format is set by verl"):
        engine_arguments(config, info_of(tiny("llama")), FOLDER)


def test_log_probs_in_our_convention_or_an_error() -> None:
    assert log_probs_mode(section(temperature=0.6)) == "processed_logprobs"
    assert log_probs_mode(section(top_p=0.9)) == "raw_logprobs"
    assert log_probs_mode(section(temperature=0.6, raw_log_probs=True)) == "raw_logprobs"
    with pytest.raises(ConfigError, match=r"before top_p and top_k at temperature=0.6"):
        log_probs_mode(section(temperature=0.6, top_p=0.9, top_k=5))


def test_end_tokens_are_stop_tokens_unless_ignored() -> None:
    sampling = SamplingParams(max_tokens=10, stop_token_ids=(9,), top_k=-1)
    given = sampling_arguments(sampling, frozenset({2, 4}), seed=3, done=4)
    assert given["stop_token_ids"] == [2, 4, 9] and given["max_tokens"] == 6 and given["seed"] == 3
    assert given["top_k"] == 0
    ignoring = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    assert sampling_arguments(ignoring, frozenset({2}), 0, 0)["stop_token_ids"] == [9]


def test_samples_may_have_no_seed() -> None:
    assert sampling_arguments(SamplingParams(), frozenset(), None, 0)["seed"] is None


def test_a_server_with_gpus_of_its_own_sees_those_after_the_trainers(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    info = info_of(tiny("llama"))
    assert server_devices(section(n_gpus_per_node=2), info) == {}
    gpu = replace(info, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert server_devices(section(), gpu) == {}
    assert server_devices(section(n_gpus_per_node=2), gpu) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    with pytest.raises(ConfigError, match="torch sees 3 GPUs"):
        server_devices(section(n_gpus_per_node=4), gpu)


def test_flags_of_the_server() -> None:
    from verl.rollout.vllm.server import command_line

    given = {"max_num_seqs": 4, "enforce_eager": True, "enable_lora": False, "x": None, "config": {"a": 1}}
    assert command_line(given) == [
        "--max-num-seqs",
        "4",
        "--enforce-eager",
        "--no-enable-lora",
        "--config",
        '{"a": 1}',
    ]


def test_what_a_run_can_place_and_what_not() -> None:
    from verl.config.checks import unavailable
    from verl.config.schema import PPOConfig

    def refused(**changes: Any) -> str:
        cfg = PPOConfig()
        for key, value in {"name": "vllm", **changes}.items():
            setattr(cfg.actor_rollout_ref.rollout, key, value)
        return " ".join(unavailable(cfg))

    assert not refused() and not refused(mode="server")
    assert not refused(mode="server", nnodes=1, n_gpus_per_node=2, tensor_model_parallel_size=2)
    assert not refused(nnodes=1, n_gpus_per_node=2) and not refused(tensor_model_parallel_size=2)
    assert "name=sglang in the trainer's process" in refused(name="sglang")
    assert "kv_cache_dtype' is fp8" in refused(kv_cache_dtype="fp8")
    assert not refused(name="native", kv_cache_dtype="fp8")


def test_where_an_engine_runs_is_not_left_over_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    set_environment(in_this_process=False)
    set_environment(in_this_process=True)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        variables = {} if before is None else {"NAME": before}
        monkeypatch.setattr("os.environ", variables)
        with environment({"NAME": "/else"}):
            assert variables["NAME"] == "/else"
        assert variables.get("NAME") == before
