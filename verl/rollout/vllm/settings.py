"""Our config keys as vLLM's engine arguments; nothing here imports vllm.

`engine_kwargs.vllm` overrides everything except what the weight sync depends on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.processes import start_time
from verl.rollout.base import SamplingParams
from verl.rollout.external_engine import engine_kwargs
from verl.rollout.source import ModelInfo

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig

HOST = "VERL_ENGINE_HOST"
SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"
WORKER_EXTENSION = "verl.rollout.vllm.worker.WeightReceiver"
_OURS = ("model", "load_format", "worker_extension_cls", "skip_tokenizer_init", "logprobs_mode")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_ENVIRONMENT = {
    # The trainer keeps its own threads; vLLM would pin all of the process's.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SERVER_ENVIRONMENT = {
    **_ENVIRONMENT,
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc and /sleep; only this user can open the socket
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "HF_HUB_OFFLINE": "1",  # everything it needs is in the folder
}


def set_environment(*, in_this_process: bool) -> None:
    """vLLM reads these. What the user set stays, except for where the engine runs, on which the weight sync depends."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_this_process else "1"


def host_environment() -> dict[str, str]:
    """The environment by which an engine's processes know this one as their host."""
    return {HOST: f"{os.getpid()}:{start_time(os.getpid())}"}


def log_probs_mode(config: RolloutConfig) -> str:
    """Which of vLLM's log-probs are ours: of the temperature-scaled distribution before penalty and filters.

    vLLM gives either raw ones (temperature 1, nothing applied) or processed ones (everything applied)."""
    filters = {
        "top_p": config.top_p < 1,
        "top_k": config.top_k > 0,
        "min_p": config.min_p > 0,
        "repetition_penalty": config.repetition_penalty != 1,
    }
    used = " and ".join(name for name, on in filters.items() if on)
    if config.raw_log_probs or (used and config.temperature == 1):
        return "raw_logprobs"
    if not used:
        return "processed_logprobs"
    raise ConfigError(
        f"actor_rollout_ref.rollout.name=vllm cannot give log-probs before {used} at "
        f"temperature={config.temperature:g}: vLLM has them raw or with everything applied. Set "
        f"actor_rollout_ref.rollout.temperature=1, or leave {used} out, or use actor_rollout_ref.rollout.name=native"
    )


def engine_arguments(config: RolloutConfig, info: ModelInfo, folder: Path) -> dict[str, Any]:
    """The arguments of vLLM's engine; `folder` holds the model's config.json."""
    dtype = info.dtype if config.dtype == "auto" else config.dtype
    cuda = info.device == "cuda"
    if not cuda and dtype != "float32":
        raise ConfigError(
            f"actor_rollout_ref.rollout.dtype={dtype} needs a GPU with rollout.name=vllm; on the CPU set "
            "actor_rollout_ref.rollout.dtype=float32 (and actor_rollout_ref.model.dtype=float32)"
        )
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": log_probs_mode(config),
        "dtype": ("bfloat16" if info.dtype == "float32" else info.dtype) if dtype == "fp8" else dtype,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enforce_eager": config.enforce_eager or not cuda,
        "enable_prefix_caching": True,
        "max_num_seqs": config.most_sequences,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.most_sequences),
        "max_model_len": config.max_model_len or info.max_positions,
        "seed": config.seed,
    }
    if config.tensor_model_parallel_size > 1:
        # By default vLLM inside a Ray actor looks for workers in the actor's placement group.
        arguments["distributed_executor_backend"] = "mp"
    if dtype == "fp8":
        arguments["quantization"] = "fp8"
    if cuda:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.free_cache_engine
    if info.lora_rank:
        arguments.update(enable_lora=True, max_loras=1, max_lora_rank=_lora_rank(info.lora_rank))
    return {**arguments, **engine_kwargs("vllm", config.engine_kwargs.vllm, _OURS)}


def _lora_rank(rank: int) -> int:
    """The smallest of vLLM's adapter sizes that is large enough."""
    fitting = [size for size in _LORA_RANKS if size >= rank]
    if not fitting:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank is {rank}; vLLM takes adapters up to rank {_LORA_RANKS[-1]}. Lower "
            "it, or use actor_rollout_ref.rollout.name=native"
        )
    return fitting[0]


def sampling_arguments(
    sampling: SamplingParams, eos_ids: frozenset[int], seed: int | None, done: int
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for one sample that already has `done` tokens."""
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens - done,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,  # vLLM has no tokenizer: end tokens are among the stop tokens
        "seed": seed,
        "logprobs": 0,
    }
