"""Sampling responses for a file of prompts: the keys of training where it has them, and the files in and out."""

# ruff: noqa: RUF009 - `key`, `shared` and `section` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import key, section, shared
from verl.config.sections.data import DataConfig, file_errors
from verl.config.sections.model import ModelConfig
from verl.config.sections.rollout import EngineKwargsConfig, RolloutConfig, engine_errors
from verl.config.sections.trainer import TrainerConfig


@dataclass
class GenerationModelConfig:
    """The model that answers."""

    path: str = key(
        "",
        "Hugging Face folder or id, run folder, global_step_N, or folder of a LoRA adapter",
        required=True,
        path=True,
    )
    tokenizer_path: str | None = shared(ModelConfig, "tokenizer_path")
    lora_path: str | None = key(None, "folder of a LoRA adapter that is merged into the model", path=True)
    trust_remote_code: bool = shared(ModelConfig, "trust_remote_code")
    override_config: dict[str, Any] = shared(ModelConfig, "override_config")
    external_lib: list[str] = shared(ModelConfig, "external_lib")


@dataclass
class GenerationDataConfig:
    """Prompts in, responses out."""

    path: list[str] = key(
        [],
        "prompts: parquet, json, jsonl or csv file, folder, dataset id, or a list of them",
        required=True,
        path=True,
    )
    output_path: str = key(
        "",
        "file to write: .parquet, .jsonl or .json; appears when everything is generated",
        required=True,
        path=True,
    )
    overwrite: bool = key(
        False, "replace output_path, and what an interrupted generation with other settings has left"
    )
    prompt_key: str = shared(DataConfig, "prompt_key")
    response_key: str = key(
        "responses", "column that gets the responses, and beginning of the names beside it"
    )
    max_samples: int = key(-1, "generate only for the first so many rows; -1: all", ge=-1)
    batch_size: int = key(1024, "prompts handed to the engine at a time; changes no response", ge=1)
    save_token_ids: bool = key(False, "write the token ids of the responses too")
    save_log_probs: bool = key(False, "write the log-prob of each token too, as in training")
    max_prompt_length: int = shared(DataConfig, "max_prompt_length")
    max_response_length: int = shared(DataConfig, "max_response_length")
    truncation: str = shared(DataConfig, "truncation")
    filter_overlong_prompts: bool = shared(
        DataConfig, "filter_overlong_prompts", "leave rows with longer prompts out (goes before truncation)"
    )
    filter_overlong_prompts_workers: int | None = shared(
        DataConfig, "filter_overlong_prompts_workers", used_if=".filter_overlong_prompts or .truncation=error"
    )
    cache_dir: str | None = shared(
        DataConfig, "cache_dir", used_if=".filter_overlong_prompts or .truncation=error"
    )
    chat_template: str | None = shared(DataConfig, "chat_template")
    apply_chat_template_kwargs: dict[str, Any] = shared(DataConfig, "apply_chat_template_kwargs")
    system_prompt: str | None = shared(DataConfig, "system_prompt")
    raw_prompts: bool = shared(DataConfig, "raw_prompts")

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        return file_errors(name, self.output_path, self.max_samples)


@dataclass
class GenerationRolloutConfig:
    """The engine that generates, as in training."""

    name: str = shared(RolloutConfig, "name")
    mode: str = shared(RolloutConfig, "mode", "vllm and sglang: in this process or as a server")
    n: int = shared(RolloutConfig, "n")
    temperature: float = shared(RolloutConfig, "temperature", "sampling temperature; 0: greedy")
    top_p: float = shared(RolloutConfig, "top_p")
    top_k: int = shared(RolloutConfig, "top_k")
    min_p: float = shared(RolloutConfig, "min_p")
    repetition_penalty: float = shared(RolloutConfig, "repetition_penalty")
    stop: list[str] = shared(RolloutConfig, "stop")
    stop_token_ids: list[int] = shared(RolloutConfig, "stop_token_ids")
    ignore_eos: bool = shared(RolloutConfig, "ignore_eos")
    raw_log_probs: bool = shared(RolloutConfig, "raw_log_probs", used_if="data.save_log_probs")
    seed: int = shared(RolloutConfig, "seed", used_if=".temperature")
    per_request_seed: bool = shared(RolloutConfig, "per_request_seed")
    dtype: str = shared(RolloutConfig, "dtype", "of the weights; auto: bfloat16 on GPU, float32 on CPU")
    tensor_model_parallel_size: int = shared(RolloutConfig, "tensor_model_parallel_size")
    gpu_memory_utilization: float = shared(RolloutConfig, "gpu_memory_utilization")
    max_num_seqs: int = shared(RolloutConfig, "max_num_seqs")
    max_num_batched_tokens: int = shared(RolloutConfig, "max_num_batched_tokens")
    max_model_len: int | None = shared(RolloutConfig, "max_model_len", used_if=".name!=hf")
    enforce_eager: bool = shared(RolloutConfig, "enforce_eager")
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig, "extra arguments per engine")

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        lines = engine_errors(name, self.name, self.mode)
        if self.name == "hf" and self.dtype == "fp8":
            lines.append(
                f"'{name}.dtype' is fp8, which {name}.name=hf does not support; use native, or another dtype"
            )
        return lines


@dataclass
class GenerationTrainerConfig:
    """Where it runs. The section has training's name, so that the same keys mean the same."""

    n_gpus_per_node: int = shared(TrainerConfig, "n_gpus_per_node")
    nnodes: int = shared(TrainerConfig, "nnodes")
    device: str = shared(TrainerConfig, "device")
    seed: int = shared(TrainerConfig, "seed")
    watchdog_s: float = shared(TrainerConfig, "watchdog_s")
    plugins: list[str] = shared(TrainerConfig, "plugins")
