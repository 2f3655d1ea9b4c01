"""The config as typed dataclasses: every key, its type and its default. Imports neither torch nor omegaconf."""

# ruff: noqa: F401, RUF009 - sections are imported from here; `section` returns dataclasses.field

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.config.keys import section
from verl.config.sections.actor import ActorConfig, CriticConfig, PolicyLossConfig, RefConfig
from verl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from verl.config.sections.data import DataConfig, MixtureConfig, SFTDataConfig
from verl.config.sections.generation import (
    EvaluationDataConfig,
    EvaluationRewardConfig,
    EvaluationTrainerConfig,
    GenerationDataConfig,
    GenerationModelConfig,
    GenerationRolloutConfig,
)
from verl.config.sections.model import (
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    SFTModelConfig,
    SFTOptimConfig,
)
from verl.config.sections.reward import RewardConfig, RewardFunctionConfig, WeightedRewardConfig
from verl.config.sections.rollout import RolloutConfig
from verl.config.sections.trainer import BaseTrainerConfig, PlacementConfig, RayKwargsConfig, TrainerConfig


def _user_set() -> Any:
    """`user_set` of every root: the full names of the keys the user set; not a key itself."""
    return field(default=frozenset(), repr=False, compare=False, metadata={"internal": True})


@dataclass
class ActorRolloutRefConfig:
    """The policy in its three roles: trained, generating, frozen."""

    model: ModelConfig = section(ModelConfig, "the model")
    actor: ActorConfig = section(ActorConfig, "training")
    rollout: RolloutConfig = section(RolloutConfig, "generating")
    ref: RefConfig = section(
        RefConfig,
        "the frozen reference policy",
        used_if=(".actor.use_kl_loss or algorithm.use_kl_in_reward", "!.model.lora_rank"),
    )


@dataclass
class PPOConfig:
    """Reinforcement learning (`verl.trainer.main_ppo`)."""

    data: DataConfig = section(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "the policy")
    critic: CriticConfig = section(CriticConfig, "the value model", used_if="critic.enable")
    reward: RewardConfig = section(RewardConfig, "what a response is worth")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "from scores to advantages")
    trainer: TrainerConfig = section(TrainerConfig, "the run")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray", used_if="@ray")
    user_set: frozenset[str] = _user_set()


@dataclass
class SFTConfig:
    """Supervised fine-tuning (`verl.trainer.sft_trainer`)."""

    data: SFTDataConfig = section(SFTDataConfig, "rows")
    model: SFTModelConfig = section(SFTModelConfig, "the model")
    optim: SFTOptimConfig = section(SFTOptimConfig, "optimiser and schedule")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")
    trainer: BaseTrainerConfig = section(BaseTrainerConfig, "the run")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray", used_if="@ray")
    user_set: frozenset[str] = _user_set()


@dataclass
class GenerationConfig:
    """Sampling responses for a file of prompts (`verl.trainer.main_generation`)."""

    model: GenerationModelConfig = section(GenerationModelConfig, "the model that answers")
    data: GenerationDataConfig = section(GenerationDataConfig, "prompts in, responses out")
    rollout: GenerationRolloutConfig = section(GenerationRolloutConfig, "generating")
    trainer: PlacementConfig = section(PlacementConfig, "where it runs")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray", used_if="@ray")
    user_set: frozenset[str] = _user_set()


@dataclass
class EvaluationConfig:
    """Scoring a file of responses (`verl.trainer.main_eval`)."""

    data: EvaluationDataConfig = section(EvaluationDataConfig, "responses in, numbers out")
    reward: EvaluationRewardConfig = section(EvaluationRewardConfig, "what a response is worth")
    trainer: EvaluationTrainerConfig = section(EvaluationTrainerConfig, "modules of your own")
    user_set: frozenset[str] = _user_set()


AnyConfig = PPOConfig | SFTConfig | GenerationConfig | EvaluationConfig
