"""The policy, the reference policy, the critic and the implicit reward model: losses, batches and engines."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Conditions, Section, key, section, shared
from verl.config.methods import POLICY_LOSS, PREFERENCE_LOSS, builtin_names, read_by
from verl.config.sections.algorithm import KL_TYPES
from verl.config.sections.model import (
    CheckpointConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
    TrainEngineConfig,
)

_loss_reads = read_by(POLICY_LOSS)

PAIRINGS = ("best_worst", "all")
LOSS_AGG_MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip


def _pair_losses() -> tuple[str, ...]:
    return builtin_names(PREFERENCE_LOSS, lambda method: method.compares_responses and bool(method.needs))


def _pair_loss_reads(name: str) -> str:
    names = builtin_names(PREFERENCE_LOSS, lambda method: name in (method.reads or ()))
    return f".pair_loss={'|'.join(each for each in names if each in _pair_losses())}"


@dataclass
class PolicyLossConfig(Section):
    """Which policy loss, and the numbers only some of them read."""

    loss_mode: str = key(
        "vanilla", "policy loss", known=lambda: builtin_names(POLICY_LOSS), plugin="policy_loss"
    )
    clip_cov_ratio: float = key(2e-4, "share of tokens dropped", ge=0, le=1, used_if=_loss_reads)
    clip_cov_lb: float = key(1.0, "lower bound of the covariance", used_if=_loss_reads)
    clip_cov_ub: float = key(5.0, "upper bound of the covariance", used_if=_loss_reads)
    kl_cov_ratio: float = key(2e-4, "share of tokens with the KL term", ge=0, le=1, used_if=_loss_reads)
    ppo_kl_coef: float = key(1.0, "weight of that term", ge=0, used_if=_loss_reads)
    tau_pos: float = key(1.0, "gate temperature for positive advantages", gt=0, used_if=_loss_reads)
    tau_neg: float = key(1.05, "gate temperature for the others", gt=0, used_if=_loss_reads)
    beta: float = key(
        0.1,
        "dro: weight of the quadratic term; online_dpo, spin: of the log-ratio to the reference",
        gt=0,
        used_if=_loss_reads,
    )
    pair_loss: str = key("dpo", "loss of a pair", known=_pair_losses, used_if=_loss_reads)
    label_smoothing: float = key(
        0.0, "share of pairs in the wrong order", ge=0, lt=0.5, used_if=(_loss_reads, _pair_loss_reads)
    )
    pairs: str = key(
        "best_worst", "which responses to a prompt are compared", known=PAIRINGS, used_if=_loss_reads
    )
    sppo_eta: float = key(1.0, "by how much a win moves the log-ratio", gt=0, used_if=_loss_reads)
    seed: int = key(1, "seed of the choice", follows="trainer.seed", used_if=_loss_reads)


@dataclass
class ActorConfig(TrainEngineConfig, Section):
    """The policy being trained."""

    optim: OptimConfig = section(OptimConfig, "optimiser and schedule")
    ppo_mini_batch_size: int = key(256, "prompts per optimiser step, over all ranks", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per pass; default: measured", ge=1, used_if="!.use_dynamic_bsz"
    )
    use_dynamic_bsz: bool = key(False, "cut micro-batches by tokens instead of sequences")
    ppo_max_token_len_per_gpu: int | None = key(
        None, "token budget of a micro-batch; default: measured", ge=1, used_if=".use_dynamic_bsz"
    )
    ppo_epochs: int = key(1, "passes over each batch of responses", ge=1)
    clip_ratio: float = key(
        0.2, "PPO clip range", ge=0, used_if=(_loss_reads, ".clip_ratio_low=None or .clip_ratio_high=None")
    )
    clip_ratio_low: float | None = key(
        None, "clip range below 1; default: clip_ratio", ge=0, used_if=_loss_reads
    )
    clip_ratio_high: float | None = key(
        None, "clip range above 1; default: clip_ratio", ge=0, used_if=_loss_reads
    )
    clip_ratio_c: float = key(3.0, "dual clip: bound for negative advantages", gt=1, used_if=_loss_reads)
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping", ge=0)
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = key(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = key(0.001, "weight of that KL", ge=0, used_if=".use_kl_loss")
    kl_loss_type: str = key(
        "low_var_kl", "its estimator; +: gradient of k2", known=KL_TYPES, used_if=".use_kl_loss"
    )
    loss_agg_mode: str = key(
        "token-mean",
        "how token losses become one number",
        known=LOSS_AGG_MODES,
        used_if=lambda name: f"{_loss_reads(name)} or .entropy_coeff or .use_kl_loss",
    )
    loss_scale_factor: int | None = key(
        None,
        "divisor; default: data.max_response_length",
        ge=1,
        follows="data.max_response_length",
        used_if=".loss_agg_mode=seq-mean-token-sum-norm",
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "policy loss")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")


def _as_actor(name: str, used_if: Conditions | None = None) -> Any:
    """A key that follows the actor's."""
    return shared(ActorConfig, name, used_if=used_if, follows=f"actor_rollout_ref.actor.{name}")


def _as_actor_size(name: str) -> Any:
    """A parallel size that follows the actor's."""
    return shared(MegatronConfig, name, follows=f"actor_rollout_ref.actor.megatron.{name}")


@dataclass
class FollowingMegatronConfig(MegatronConfig):
    """Megatron's sizes of another role; those that are not set are the actor's."""

    tensor_model_parallel_size: int = _as_actor_size("tensor_model_parallel_size")
    pipeline_model_parallel_size: int = _as_actor_size("pipeline_model_parallel_size")
    context_parallel_size: int = _as_actor_size("context_parallel_size")
    expert_model_parallel_size: int = _as_actor_size("expert_model_parallel_size")


@dataclass
class FollowingShardingConfig(ShardingConfig):
    """The engine of another role; what is not set is as the actor's."""

    strategy: str = _as_actor("strategy")
    ulysses_sequence_parallel_size: int = _as_actor("ulysses_sequence_parallel_size")
    megatron: FollowingMegatronConfig = section(
        FollowingMegatronConfig,
        "megatron's parallel sizes; default: the actor's",
        used_if=".strategy=megatron",
    )


@dataclass
class LogProbConfig:
    """How log-probs are computed without gradient."""

    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per pass; default: measured", ge=1, used_if="!.log_prob_use_dynamic_bsz"
    )
    log_prob_use_dynamic_bsz: bool = _as_actor("use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = _as_actor(
        "ppo_max_token_len_per_gpu", ".log_prob_use_dynamic_bsz"
    )


@dataclass
class RefConfig(LogProbConfig, FollowingShardingConfig):
    """The frozen reference policy (the model before training; adapters off under LoRA)."""


@dataclass
class FrozenRoleConfig(RefConfig):
    """A frozen role with a model of its own; whatever is not said here is as in `actor_rollout_ref.model`."""

    path: str = key("", "its Hugging Face folder or id; it has the student's tokens", path=True)


@dataclass
class TeacherConfig(FrozenRoleConfig):
    """The frozen teacher of distillation; whatever is not said here is as in `actor_rollout_ref.model`."""

    kl: str = key(
        "reverse",
        "reverse: KL(student || teacher); forward: the other way round",
        known=("reverse", "forward"),
    )
    top_k: int | None = key(
        None, "compare its most probable tokens, all others as one; default: every token", ge=1
    )


@dataclass
class CriticConfig(FollowingShardingConfig, TrainEngineConfig):
    """The value model; used by the estimators that need one (gae)."""

    enable: bool | None = key(None, "train a critic; default: when the estimator needs one")
    model: ModelConfig = section(ModelConfig, "the model the value head sits on; default path: the actor's")
    optim: OptimConfig = section(OptimConfig, "optimiser and schedule", lr=1e-5)
    ppo_mini_batch_size: int = _as_actor("ppo_mini_batch_size")
    ppo_micro_batch_size_per_gpu: int | None = shared(ActorConfig, "ppo_micro_batch_size_per_gpu")
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "sequences per pass without gradient; default: measured",
        ge=1,
        follows="critic.ppo_micro_batch_size_per_gpu",
        used_if="!.use_dynamic_bsz",
    )
    use_dynamic_bsz: bool = _as_actor("use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | None = _as_actor("ppo_max_token_len_per_gpu")
    ppo_epochs: int = _as_actor("ppo_epochs")
    grad_clip: float = shared(ActorConfig, "grad_clip")
    cliprange_value: float = key(0.5, "how far a value may move before its loss is clipped", ge=0)
    loss_agg_mode: str = shared(ActorConfig, "loss_agg_mode", used_if=())
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")


@dataclass
class TrainedRoleConfig(LogProbConfig, FollowingShardingConfig, TrainEngineConfig):
    """A language model with the policy's tokens that is trained beside it."""

    model: ModelConfig = section(
        ModelConfig, "the model, with the policy's tokens; default path: the actor's"
    )
    optim: OptimConfig = section(OptimConfig, "optimiser and schedule")
    ppo_mini_batch_size: int = _as_actor("ppo_mini_batch_size")
    ppo_micro_batch_size_per_gpu: int | None = shared(ActorConfig, "ppo_micro_batch_size_per_gpu")
    use_dynamic_bsz: bool = _as_actor("use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | None = _as_actor("ppo_max_token_len_per_gpu")
    ppo_epochs: int = shared(ActorConfig, "ppo_epochs")
    grad_clip: float = key(10.0, "largest gradient norm; 0: no clipping", ge=0)
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")


@dataclass
class ImplicitRewardConfig(TrainedRoleConfig):
    """The implicit reward model of prime: a language model whose log-ratio to its start is the reward of each token,
    trained on the outcomes of the policy's responses."""

    beta: float = key(0.05, "the reward of a token is beta times its log-ratio", gt=0)
    update: str = key("before", "train on a batch before or after scoring it", known=("before", "after"))
    threshold: float = key(0.5, "a response with a score above it is a right one")
