"""Our keys as vLLM's engine arguments. Pure: nothing here imports vllm.

What always holds: `engine_kwargs.vllm` has the last word, except over what the hand-over of weights stands on.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.lora import has_lora
from verl.rollout.base import SamplingParams
from verl.rollout.requests import eos_token_ids
from verl.rollout.source import as_source, causal_lm
from verl.rollout.weight_sync.received import ReceivedWeights
from verl.rollout.weight_sync.stale_files import new_path, sweep
from verl.rollout.weight_sync.weights import TiedHead, tied_head

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
    "VLLM_SERVER_DEV_MODE": "1",  # brings /collective_rpc and /sleep; the socket is this user's alone
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "HF_HUB_OFFLINE": "1",  # everything it needs is in the folder
}


@dataclass(frozen=True)
class ModelFacts:
    """What an engine has to know of the trainer's model."""

    folder: Path
    """Where `write` puts config.json and nothing else: the weights come by hand-over."""
    config_json: str
    vocab_size: int
    eos_ids: frozenset[int]
    dtype: str
    device: str
    tied: TiedHead | None
    lora_rank: int
    max_positions: int | None

    def write(self) -> None:
        """Make the folder, for this user alone, and remove those of processes that were killed."""
        sweep()
        self.folder.mkdir(mode=0o700)
        (self.folder / "config.json").write_text(self.config_json)


def read_model(source: Any, tokenizer: Any) -> ModelFacts:
    """The facts of a source's model. A source that is far from its model brings them along."""
    if isinstance(source, ReceivedWeights):
        return replace(source.model_facts, folder=new_path("rollout"))
    source = as_source(source)
    with source.structure() as module:
        model = causal_lm(module)
        embeddings = model.get_input_embeddings()
        config = model.config.get_text_config()
        return ModelFacts(
            folder=new_path("rollout"),
            config_json=_config_json(model),
            vocab_size=int(embeddings.num_embeddings),
            eos_ids=eos_token_ids(model, tokenizer),
            dtype=str(source.dtype).removeprefix("torch."),
            device=source.device.type,
            tied=tied_head(model),
            lora_rank=int(model.verl_lora_config.r) if has_lora(model) else 0,
            max_positions=getattr(config, "max_position_embeddings", None),
        )


def _config_json(model: Any) -> str:
    content = json.loads(model.config.to_json_string(use_diff=False))
    # Sharding renames the class of a module; vLLM finds its own class by this name.
    content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return json.dumps(content, indent=2)


def set_environment(*, in_this_process: bool) -> None:
    """vLLM reads these; what the user set stays, except for where the engine runs, on which the hand-over stands (and
    which an engine before may have wanted elsewhere)."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_this_process else "1"


def own_devices(config: Any, facts: ModelFacts) -> dict[str, str]:
    """The environment of a server with GPUs of its own (`rollout.n_gpus_per_node`): those after the trainer's."""
    count = int(getattr(config, "n_gpus_per_node", 0))
    if facts.device != "cuda" or count == 0:
        return {}
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    visible = named or [str(number) for number in range(torch.cuda.device_count())]
    if len(visible) < count + 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n_gpus_per_node is {count}, beside the trainer's one; torch sees "
            f"{len(visible)} GPUs. Lower it together with actor_rollout_ref.rollout.tensor_model_parallel_size, or "
            "set both to what is there"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[1 : count + 1])}


def log_probs_mode(config: Any) -> str:
    """Which of vLLM's log-probs are ours: of the temperature-scaled distribution before penalty and filters.

    vLLM gives either raw ones (temperature 1, nothing applied) or processed ones (everything applied)."""
    temperature = getattr(config, "temperature", 1.0)
    filters = {
        "top_p": getattr(config, "top_p", 1.0) < 1,
        "top_k": getattr(config, "top_k", -1) > 0,
        "min_p": getattr(config, "min_p", 0.0) > 0,
        "repetition_penalty": getattr(config, "repetition_penalty", 1.0) != 1,
    }
    used = [name for name, on in filters.items() if on]
    if getattr(config, "raw_log_probs", False):
        return "raw_logprobs"
    if not used:
        return "processed_logprobs"
    if temperature == 1:
        return "raw_logprobs"
    raise ConfigError(
        f"actor_rollout_ref.rollout.name=vllm cannot give log-probs before {' and '.join(used)} at "
        f"temperature={temperature:g}: vLLM has them raw or with everything applied. Set "
        f"actor_rollout_ref.rollout.temperature=1, or leave {' and '.join(used)} out, or use "
        "actor_rollout_ref.rollout.name=native"
    )


def precision(config: Any, facts: ModelFacts) -> str:
    """float32, bfloat16, float16 or fp8."""
    wanted = getattr(config, "dtype", "auto")
    wanted = facts.dtype if wanted == "auto" else wanted
    if facts.device == "cpu" and wanted != "float32":
        raise ConfigError(
            f"actor_rollout_ref.rollout.dtype={wanted} needs a GPU with rollout.name=vllm; on the CPU set "
            "actor_rollout_ref.rollout.dtype=float32 (and actor_rollout_ref.model.dtype=float32)"
        )
    return wanted


def engine_arguments(config: Any, facts: ModelFacts) -> dict[str, Any]:
    """The arguments of vLLM's engine."""
    kind = precision(config, facts)
    cuda = facts.device == "cuda"
    arguments: dict[str, Any] = {
        "model": str(facts.folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": log_probs_mode(config),
        "dtype": ("bfloat16" if facts.dtype == "float32" else facts.dtype) if kind == "fp8" else kind,
        "tensor_parallel_size": int(getattr(config, "tensor_model_parallel_size", 1)),
        "enforce_eager": bool(getattr(config, "enforce_eager", False)) or not cuda,
        "max_num_seqs": int(getattr(config, "max_num_seqs", 256)),
        "max_model_len": max_length(config, facts),
        "seed": int(getattr(config, "seed", 0)),
    }
    arguments["max_num_batched_tokens"] = max(
        int(getattr(config, "max_num_batched_tokens", 8192)), arguments["max_num_seqs"]
    )
    if arguments["tensor_parallel_size"] > 1:
        # Left alone, vLLM inside a Ray actor looks for workers in the actor's own placement group.
        arguments["distributed_executor_backend"] = "mp"
    if kind == "fp8":
        arguments["quantization"] = "fp8"
    if cuda:
        arguments["gpu_memory_utilization"] = float(getattr(config, "gpu_memory_utilization", 0.5))
        arguments["enable_sleep_mode"] = bool(getattr(config, "free_cache_engine", True))
    if facts.lora_rank:
        arguments.update(enable_lora=True, max_loras=1, max_lora_rank=_lora_rank(facts.lora_rank))
    return {**arguments, **_extra(config)}


def max_length(config: Any, facts: ModelFacts) -> int | None:
    return getattr(config, "max_model_len", None) or facts.max_positions


def _lora_rank(rank: int) -> int:
    """vLLM has rooms of these sizes; a smaller adapter fits in a larger one."""
    fitting = [size for size in _LORA_RANKS if size >= rank]
    if not fitting:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank is {rank}; vLLM takes adapters up to rank {_LORA_RANKS[-1]}. Lower "
            "it, or use actor_rollout_ref.rollout.name=native"
        )
    return fitting[0]


def _extra(config: Any) -> dict[str, Any]:
    kwargs = getattr(config, "engine_kwargs", None)
    extra = dict(getattr(kwargs, "vllm", None) or {})
    taken = sorted(set(extra) & set(_OURS))
    if taken:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.{taken[0]} is decided by verl (weights come from the "
            "trainer, log-probs in its convention); leave it out"
        )
    return extra


def per_request_seed(config: Any) -> bool:
    """Whether every sample is drawn with a seed of its own (`rollout.per_request_seed`)."""
    return bool(getattr(config, "per_request_seed", True))


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
        "ignore_eos": True,  # ends are among the stop tokens: vLLM has no tokenizer to know them from
        "seed": seed,
        "logprobs": 0,
    }
