"""The config as typed dataclasses: every key, its type and its default. Imports neither torch nor omegaconf.

The sections of training are in `verl.config.sections`; those that only generation, evaluation and preferences have
stand here, before the configs of the commands.
"""

# ruff: noqa: F401, RUF009 - sections are imported from here; `section` returns dataclasses.field

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.config.capabilities import engine_spec
from verl.config.keys import key, section, shared
from verl.config.methods import (
    ADV_ESTIMATOR,
    POLICY_LOSS,
    PREFERENCE_LOSS,
    builtin_names,
    find_method,
    needed_by,
    provides,
    read_by,
)
from verl.config.sections.actor import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    FrozenRoleConfig,
    ImplicitRewardConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
    SFTModelConfig,
    SFTOptimConfig,
    TeacherConfig,
    TrainedRoleConfig,
)
from verl.config.sections.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from verl.config.sections.data import (
    DataConfig,
    MixtureConfig,
    OfflineDataConfig,
    PromptsConfig,
    SFTDataConfig,
    file_errors,
)
from verl.config.sections.reward import (
    RewardConfig,
    RewardFunctionConfig,
    RewardManagerConfig,
    WeightedRewardConfig,
)
from verl.config.sections.rollout import EngineConfig, RolloutConfig, engine_errors
from verl.config.sections.trainer import (
    BaseTrainerConfig,
    OfflineTrainerConfig,
    PlacementConfig,
    RayKwargsConfig,
    TrainerConfig,
)


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

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        return file_errors(name, self.output_path, self.max_samples)


@dataclass
class GenerationRolloutConfig(EngineConfig):
    """The engine that generates, as in training."""

    raw_log_probs: bool = shared(EngineConfig, "raw_log_probs", used_if="data.save_log_probs")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        yield from engine_errors(name, self.name, self.mode, self.kv_cache_dtype)
        yield from self.agent_errors(name)
        if self.dtype == "fp8" and not engine_spec(self.name).fp8:
            yield (
                f"'{name}.dtype' is fp8, which {name}.name={self.name} does not support; use native, or another dtype"
            )


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

    def errors(self, name: str) -> Iterator[str]:
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

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        yield from super().errors(name)
        if self.reward_model.n_gpus_per_node or self.reward_model.nnodes:
            yield (
                f"'{name}.reward_model.n_gpus_per_node' and 'nnodes' need a trainer's Ray cluster; set both to 0"
            )
        if self.overlong_buffer.enable:
            yield (
                f"'{name}.overlong_buffer.enable' is True; the penalty is part of training, set it to False"
            )


@dataclass
class EvaluationTrainerConfig:
    """The section has training's name, so that the same keys mean the same."""

    plugins: list[str] = shared(TrainerConfig, "plugins")


_AS_SCORED = "a reward model reads conversations in training as it does when it scores"
_loss_reads = read_by(PREFERENCE_LOSS)


@dataclass
class PreferenceDataConfig(OfflineDataConfig):
    """Pairs of answers to one prompt."""

    prompt_key: str = shared(
        OfflineDataConfig, "prompt_key", "column with the prompt; absent: what both conversations start with"
    )
    response_key: str = shared(
        OfflineDataConfig, "response_key", "no effect: see chosen_key and rejected_key", "@never"
    )
    chosen_key: str = key("chosen", "column with the better answer: a string or messages")
    rejected_key: str = key("rejected", "column with the worse one")
    train_batch_size: int = shared(
        OfflineDataConfig, "train_batch_size", "pairs per optimiser step; default: at most the data"
    )
    micro_batch_size_per_gpu: int | None = shared(
        OfflineDataConfig, "micro_batch_size_per_gpu", "pairs per pass; default: measured"
    )
    max_length: int = shared(OfflineDataConfig, "max_length", "longest prompt with an answer, in tokens")


@dataclass
class DPODataConfig(PreferenceDataConfig):
    """Pairs of answers, or for kto single ones that are judged alone."""

    completion_key: str = key(
        "completion",
        "column with a single answer, judged by label_key: a string or messages",
        used_if=_loss_reads,
    )
    label_key: str = key(
        "label", "column with whether that answer is desirable: true or false", used_if=_loss_reads
    )
    train_batch_size: int = shared(
        OfflineDataConfig,
        "train_batch_size",
        "pairs (kto: answers) per optimiser step; default: at most the data",
    )
    micro_batch_size_per_gpu: int | None = shared(
        OfflineDataConfig, "micro_batch_size_per_gpu", "pairs (kto: answers) per pass; default: measured"
    )


@dataclass
class RewardDataConfig(PreferenceDataConfig):
    """Pairs of answers, with how much better the chosen one is; or answers whose steps are judged."""

    apply_chat_template: str = shared(
        OfflineDataConfig, "apply_chat_template", f"no effect: {_AS_SCORED}", "@never"
    )
    apply_chat_template_kwargs: dict[str, Any] = shared(
        OfflineDataConfig, "apply_chat_template_kwargs", f"no effect: {_AS_SCORED}", "@never"
    )
    system_prompt: str | None = shared(
        OfflineDataConfig, "system_prompt", f"no effect: {_AS_SCORED}", "@never"
    )
    parse_special_tokens: bool = shared(
        OfflineDataConfig, "parse_special_tokens", f"no effect: {_AS_SCORED}", "@never"
    )
    chosen_key: str = shared(PreferenceDataConfig, "chosen_key", used_if="!algorithm.stepwise")
    rejected_key: str = shared(PreferenceDataConfig, "rejected_key", used_if="!algorithm.stepwise")
    margin_key: str = key(
        "margin",
        "column with how much better the chosen answer is; used where the rows have it",
        used_if="!algorithm.stepwise",
    )
    completions_key: str = key(
        "completions", "column with the steps of an answer, a list of texts", used_if="algorithm.stepwise"
    )
    labels_key: str = key(
        "labels",
        "column with how right each step is: true or false, or numbers from 0 to 1",
        used_if="algorithm.stepwise",
    )
    step_separator: str = key("\n", "what is written after each step", used_if="algorithm.stepwise")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if not self.step_separator:
            yield f"'{name}.step_separator' is empty; it marks where a step ends: give a text, such as a newline"


@dataclass
class PreferenceAlgorithmConfig:
    """The preference loss."""

    loss: str = key(
        "dpo", "loss of a pair (kto: of each answer)", known=lambda: builtin_names(PREFERENCE_LOSS)
    )
    beta: float = key(0.1, "weight of the log-ratio to the reference; orpo: of the odds ratio", gt=0)
    label_smoothing: float = key(0.0, "share of the labels that are wrong", ge=0, lt=0.5, used_if=_loss_reads)
    simpo_gamma: float = key(0.5, "margin of simpo", ge=0, used_if=_loss_reads)
    desirable_weight: float = key(1.0, "weight of desirable (or chosen) answers", ge=0, used_if=_loss_reads)
    undesirable_weight: float = key(
        1.0, "weight of undesirable (or rejected) answers", ge=0, used_if=_loss_reads
    )
    cache_reference: bool = key(
        True,
        "compute the reference's log-probs once, before training; False: in every step, by the model without its "
        "LoRA adapters",
        used_if=needed_by(PREFERENCE_LOSS, "ref_log_prob"),
    )


@dataclass
class RewardAlgorithmConfig:
    """The loss of a reward model: Bradley-Terry's of pairs, or the cross-entropy of each step."""

    stepwise: bool = key(
        False, "learn a score for each step of an answer (a process reward model) in place of pairs"
    )
    margin: float = key(
        0.0,
        "least difference of rewards wanted of each pair; data.margin_key adds to it",
        used_if="!.stepwise",
    )
    center_rewards_coefficient: float = key(
        0.0,
        "weight of the squared sum of a pair's rewards, which keeps them around 0",
        ge=0,
        used_if="!.stepwise",
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
            provides(POLICY_LOSS, "ref_log_prob", ".actor.use_kl_loss", "algorithm.use_kl_in_reward"),
            "!.model.lora_rank",
        ),
    )
    teacher: TeacherConfig = section(
        TeacherConfig,
        "the model the policy is distilled from",
        used_if=provides(POLICY_LOSS, "teacher_log_probs", ".teacher.coef"),
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
        used_if=provides(ADV_ESTIMATOR, "process_rewards"),
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
    """What training on judged answers has in common; no command of its own."""

    data: PreferenceDataConfig = section(PreferenceDataConfig, "pairs of answers")

    @property
    def pairs(self) -> bool:
        """Whether an answer is compared with another one, not judged alone."""
        return True


@dataclass
class DPOConfig(PreferenceConfig):
    """Preference training (`verl.trainer.dpo_trainer`)."""

    data: DPODataConfig = section(DPODataConfig, "judged answers")
    algorithm: PreferenceAlgorithmConfig = section(PreferenceAlgorithmConfig, "the preference loss")
    optim: SFTOptimConfig = section(SFTOptimConfig, "optimiser and schedule", lr=1e-6)

    @property
    def pairs(self) -> bool:
        loss = find_method(PREFERENCE_LOSS, self.algorithm.loss)
        return loss is None or loss.compares_responses


@dataclass
class RewardTrainingConfig(PreferenceConfig):
    """A reward model from judged answers (`verl.trainer.reward_trainer`)."""

    data: RewardDataConfig = section(RewardDataConfig, "pairs of answers")
    algorithm: RewardAlgorithmConfig = section(RewardAlgorithmConfig, "the loss")

    @property
    def pairs(self) -> bool:
        return not self.algorithm.stepwise


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
