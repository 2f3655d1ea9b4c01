"""`main_generation` and `main_eval`: files in and out, and the keys of training where it has them."""

# ruff: noqa: RUF009 - `key`, `section` and `shared` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.capabilities import engine_spec
from verl.config.keys import key, section, shared
from verl.config.sections.data import DataConfig, PromptsConfig, file_errors
from verl.config.sections.model import ModelConfig
from verl.config.sections.reward import RewardConfig, RewardManagerConfig
from verl.config.sections.rollout import EngineConfig, engine_errors
from verl.config.sections.trainer import TrainerConfig


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
    response_key: str = key("responses", "column for the responses, and prefix of the related columns")
    max_samples: int = key(-1, "generate for at most this many rows, the first ones; -1: all", ge=-1)
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
        if self.multi_turn.enable and self.ignore_eos:
            lines.append(
                f"'{name}.ignore_eos' is True, but turns must end ({name}.multi_turn); set it to False"
            )
        if self.dtype == "fp8" and not engine_spec(self.name).fp8:
            lines.append(
                f"'{name}.dtype' is fp8, which {name}.name={self.name} does not support; use native, or another dtype"
            )
        return lines


@dataclass
class EvaluationDataConfig:
    """Responses in, numbers out."""

    path: list[str] = key([], "file, folder, dataset id, or a list of them", required=True, path=True)
    prompt_key: str = shared(DataConfig, "prompt_key")
    response_key: str = key("responses", "column that holds the responses: a list of texts, or one text")
    data_source_key: str = key("data_source", "column that names where a row comes from")
    reward_model_key: str = key("reward_model", "column with {ground_truth: ...} or the truth itself")
    max_samples: int = key(-1, "score at most this many rows, the first ones; -1: all", ge=-1)
    batch_size: int = key(1024, "rows scored at a time, also per call of a batch function", ge=1)
    metrics_path: str = key("", "json file of the numbers; default: NAME.metrics.json", path=True)
    output_path: str | None = key(None, "file for the scored rows: .parquet, .jsonl or .json", path=True)
    overwrite: bool = key(
        False,
        "replace files at output_path and metrics_path that exist",
        used_if=".output_path or .metrics_path",
    )

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        return file_errors(name, self.output_path, self.max_samples)


@dataclass
class EvaluationRewardConfig(RewardConfig):
    """What a response is worth, as in training."""

    reward_manager: RewardManagerConfig = section(
        RewardManagerConfig, "how scores are computed", name="prime"
    )
    max_failure_ratio: float = shared(
        RewardConfig, "max_failure_ratio", "no effect: failures are counted and scoring continues", "@never"
    )

    def errors(self, name: str) -> list[str]:
        """What is wrong within the section called `name`."""
        lines = super().errors(name)
        if self.reward_model.n_gpus_per_node or self.reward_model.nnodes:
            lines.append(
                f"'{name}.reward_model.n_gpus_per_node' and 'nnodes' need a trainer's Ray cluster; set both to 0"
            )
        if self.overlong_buffer.enable:
            lines.append(
                f"'{name}.overlong_buffer.enable' is True; the penalty is part of training, set it to False"
            )
        return lines


@dataclass
class EvaluationTrainerConfig:
    """The section has training's name, so that the same keys mean the same."""

    plugins: list[str] = shared(TrainerConfig, "plugins")
