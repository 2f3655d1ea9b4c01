"""Sampling responses for a file of prompts: the keys of training where it has them, and the files in and out."""

# ruff: noqa: RUF009 - `key` and `shared` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import key, shared
from verl.config.sections.data import PromptsConfig, file_errors
from verl.config.sections.model import ModelConfig
from verl.config.sections.rollout import EngineConfig, engine_errors


@dataclass
class GenerationModelConfig:
    """The model that answers."""

    path: str = key(
        "", "Hugging Face folder or id, run folder, checkpoint or LoRA adapter", required=True, path=True
    )
    tokenizer_path: str | None = shared(ModelConfig, "tokenizer_path")
    lora_path: str | None = key(None, "folder of a LoRA adapter that is merged into the model", path=True)
    trust_remote_code: bool = shared(ModelConfig, "trust_remote_code")
    override_config: dict[str, Any] = shared(ModelConfig, "override_config")
    external_lib: list[str] = shared(ModelConfig, "external_lib")


@dataclass
class GenerationDataConfig(PromptsConfig):
    """Prompts in, responses out."""

    path: list[str] = key([], "file, folder, dataset id, or a list of them", required=True, path=True)
    output_path: str = key(
        "", "file to write at the end: .parquet, .jsonl or .json", required=True, path=True
    )
    overwrite: bool = key(False, "replace output_path and the progress of other settings")
    response_key: str = key("responses", "column for the responses, and prefix of those beside it")
    max_samples: int = key(-1, "generate only for the first so many rows; -1: all", ge=-1)
    batch_size: int = key(1024, "prompts handed to the engine at a time; changes no response", ge=1)
    save_token_ids: bool = key(False, "write the token ids of the responses too")
    save_log_probs: bool = key(False, "write the log-prob of each token too, as in training")
    cache_dir: str | None = shared(
        PromptsConfig, "cache_dir", used_if=".filter_overlong_prompts or .truncation=error"
    )

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        return file_errors(name, self.output_path, self.max_samples)


@dataclass
class GenerationRolloutConfig(EngineConfig):
    """The engine that generates, as in training."""

    raw_log_probs: bool = shared(EngineConfig, "raw_log_probs", used_if="data.save_log_probs")

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        lines = engine_errors(name, self.name, self.mode)
        if self.name == "hf" and self.dtype == "fp8":
            lines.append(
                f"'{name}.dtype' is fp8, which {name}.name=hf does not support; use native, or another dtype"
            )
        return lines
