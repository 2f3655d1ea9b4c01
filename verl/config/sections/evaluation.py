"""Scoring a file of responses: which columns hold what, and the rewards of training."""

# ruff: noqa: RUF009 - `key`, `shared` and `section` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from verl.config.keys import key, section, shared
from verl.config.sections.data import DataConfig, file_errors
from verl.config.sections.reward import RewardConfig, RewardManagerConfig
from verl.config.sections.trainer import TrainerConfig


@dataclass
class EvaluationDataConfig:
    """Responses in, numbers out."""

    path: list[str] = key([], "file, folder, dataset id, or a list of them", required=True, path=True)
    prompt_key: str = shared(DataConfig, "prompt_key")
    response_key: str = key("responses", "column that holds the responses: a list of texts, or one text")
    data_source_key: str = key("data_source", "column that names where a row comes from")
    reward_model_key: str = key("reward_model", "column with {ground_truth: ...} or the truth itself")
    max_samples: int = key(-1, "score only the first so many rows; -1: all", ge=-1)
    batch_size: int = key(1024, "rows scored at a time; batch functions see so many", ge=1)
    metrics_path: str = key("", "json file of the numbers; default: NAME.metrics.json", path=True)
    output_path: str | None = key(None, "file for the scored rows: .parquet, .jsonl or .json", path=True)

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
