"""The config as typed dataclasses: every key, its type and its default. Imports neither torch nor omegaconf."""

# ruff: noqa: F401, RUF009 - sections are imported from here; `section` returns dataclasses.field

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.config.keys import section
from verl.config.methods import ADV_ESTIMATOR, POLICY_LOSS, needed_by
from verl.config.sections.actor import (
    ActorConfig,
    CriticConfig,
    FrozenRoleConfig,
    ImplicitRewardConfig,
    PolicyLossConfig,
    RefConfig,
    TeacherConfig,
    TrainedRoleConfig,
)
from verl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from verl.config.sections.data import DataConfig, MixtureConfig, OfflineDataConfig, SFTDataConfig
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
from verl.config.sections.preference import (
    PreferenceAlgorithmConfig,
    PreferenceDataConfig,
    RewardAlgorithmConfig,
    RewardDataConfig,
)
from verl.config.sections.reward import RewardConfig, RewardFunctionConfig, WeightedRewardConfig
from verl.config.sections.rollout import RolloutConfig
from verl.config.sections.trainer import (
    BaseTrainerConfig,
    OfflineTrainerConfig,
    PlacementConfig,
    RayKwargsConfig,
    TrainerConfig,
)


def _internal(make: Callable[[], Any]) -> Any:
    return field(default_factory=make, repr=False, compare=False, metadata={"internal": True})


@dataclass
class RootConfig:
    """What a command's config has besides its keys."""

    user_set: frozenset[str] = _internal(frozenset)
    """The full names of the keys the user or a recipe set."""
    recipe_set: frozenset[str] = _internal(frozenset)
    """Those of them that only the recipe set."""
    from_environment: dict[str, Any] = _internal(dict)
    """Keys whose texts hold values of environment variables, as they were given: `${oc.env:NAME}`."""


@dataclass
class ActorRolloutRefConfig:
    """The policy in its three roles: trained, generating, frozen."""

    model: ModelConfig = section(ModelConfig, "the model")
    actor: ActorConfig = section(ActorConfig, "training")
    rollout: RolloutConfig = section(RolloutConfig, "generating")
    ref: RefConfig = section(
        RefConfig,
        "the frozen reference policy",
        used_if=(
            lambda name: (
                ".actor.use_kl_loss or algorithm.use_kl_in_reward or "
                + needed_by(POLICY_LOSS, "ref_log_prob")(name)
            ),
            "!.model.lora_rank",
        ),
    )
    teacher: TeacherConfig = section(
        TeacherConfig,
        "the frozen model the policy is distilled from",
        used_if=needed_by(POLICY_LOSS, "teacher_log_probs"),
    )


@dataclass
class PPOConfig(RootConfig):
    """Reinforcement learning (`verl.trainer.main_ppo`)."""

    takes_plugin_sections: ClassVar[bool] = True
    own_loop: ClassVar[bool] = False
    """Whether batches and advantages come from a loop of the user's own: no data files, no estimator."""

    data: DataConfig = section(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "the policy")
    critic: CriticConfig = section(CriticConfig, "the value model", used_if="critic.enable")
    implicit_reward: ImplicitRewardConfig = section(
        ImplicitRewardConfig,
        "token rewards learned from outcomes",
        used_if=needed_by(ADV_ESTIMATOR, "process_rewards"),
    )
    reward: RewardConfig = section(RewardConfig, "what a response is worth")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "from scores to advantages")
    trainer: TrainerConfig = section(TrainerConfig, "the run")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray", used_if="@ray")


@dataclass
class SessionConfig(PPOConfig):
    """One policy (`verl.Session`)."""

    own_loop: ClassVar[bool] = True


@dataclass
class OfflineConfig(RootConfig):
    """What training on given answers has in common; no command of its own."""

    data: OfflineDataConfig = section(OfflineDataConfig, "rows")
    model: SFTModelConfig = section(SFTModelConfig, "the model")
    optim: SFTOptimConfig = section(SFTOptimConfig, "optimiser and schedule")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")
    trainer: OfflineTrainerConfig = section(OfflineTrainerConfig, "the run")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray", used_if="@ray")


@dataclass
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning (`verl.trainer.sft_trainer`)."""

    data: SFTDataConfig = section(SFTDataConfig, "rows")


@dataclass
class PreferenceConfig(OfflineConfig):
    """What training on pairs of answers has in common; no command of its own."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "pairs of answers")


@dataclass
class DPOConfig(PreferenceConfig):
    """Preference training (`verl.trainer.dpo_trainer`)."""

    algorithm: PreferenceAlgorithmConfig = section(PreferenceAlgorithmConfig, "the preference loss")
    optim: SFTOptimConfig = section(SFTOptimConfig, "optimiser and schedule", lr=1e-6)


@dataclass
class RewardTrainingConfig(PreferenceConfig):
    """A reward model from preferences (`verl.trainer.reward_trainer`)."""

    data: RewardDataConfig = section(RewardDataConfig, "pairs of answers")
    algorithm: RewardAlgorithmConfig = section(RewardAlgorithmConfig, "the Bradley-Terry loss")


@dataclass
class GenerationConfig(RootConfig):
    """Sampling responses for a file of prompts (`verl.trainer.main_generation`)."""

    model: GenerationModelConfig = section(GenerationModelConfig, "the model that answers")
    data: GenerationDataConfig = section(GenerationDataConfig, "prompts in, responses out")
    rollout: GenerationRolloutConfig = section(GenerationRolloutConfig, "generating")
    trainer: PlacementConfig = section(PlacementConfig, "where it runs")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray", used_if="@ray")


@dataclass
class EvaluationConfig(RootConfig):
    """Scoring a file of responses (`verl.trainer.main_eval`)."""

    data: EvaluationDataConfig = section(EvaluationDataConfig, "responses in, numbers out")
    reward: EvaluationRewardConfig = section(EvaluationRewardConfig, "what a response is worth")
    trainer: EvaluationTrainerConfig = section(EvaluationTrainerConfig, "modules of your own")


AnyConfig = PPOConfig | OfflineConfig | GenerationConfig | EvaluationConfig
