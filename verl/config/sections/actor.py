"""The policy, the reference policy and the critic: losses, batches and the engine that trains each."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from verl.config import known
from verl.config.field import key, section
from verl.config.sections.model import CheckpointConfig, FSDPConfig, MegatronConfig, ModelConfig, OptimConfig


@dataclass
class PolicyLossConfig:
    """Which policy loss, and the numbers only some of them read."""

    loss_mode: str = key("vanilla", "policy loss", known=known.POLICY_LOSSES, plugin="policy_loss")
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of tokens whose loss is dropped", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "clip_cov: lower bound of the covariance")
    clip_cov_ub: float = key(5.0, "clip_cov: upper bound of the covariance")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of tokens that get the KL term", ge=0, le=1)
    ppo_kl_coef: float = key(1.0, "kl_cov: weight of that term", ge=0)
    tau_pos: float = key(1.0, "sapo: gate temperature for positive advantages", gt=0)
    tau_neg: float = key(1.05, "sapo: gate temperature for the others", gt=0)
    beta: float = key(0.1, "dro: weight of the quadratic term", gt=0)
    seed: int = key(1, "clip_cov: seed of the random choice; default: trainer.seed", follows="trainer.seed")


@dataclass
class ActorConfig:
    """The policy being trained."""

    strategy: str = key("fsdp", "training engine", known=known.STRATEGIES)
    optim: OptimConfig = section(OptimConfig, "optimiser and schedule")
    ppo_mini_batch_size: int = key(256, "prompts per optimiser step, over all ranks", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per forward and backward pass; default: measured at start", ge=1
    )
    use_dynamic_bsz: bool = key(
        False, "cut micro-batches by tokens (ppo_max_token_len_per_gpu) instead of sequences"
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None, "token budget of a micro-batch; default: measured", ge=1
    )
    ppo_epochs: int = key(1, "passes over each batch of responses", ge=1)
    clip_ratio: float = key(0.2, "PPO clip range on both sides", ge=0)
    clip_ratio_low: float | None = key(None, "clip range below 1; default: clip_ratio", ge=0)
    clip_ratio_high: float | None = key(None, "clip range above 1; default: clip_ratio", ge=0)
    clip_ratio_c: float = key(3.0, "dual clip: bound of the loss for negative advantages", gt=1)
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping", ge=0)
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = key(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = key(0.001, "weight of that KL", ge=0)
    kl_loss_type: str = key(
        "low_var_kl", "its estimator; a trailing + takes the gradient of k2", known=known.KL_TYPES
    )
    loss_agg_mode: str = key("token-mean", "how token losses become one number", known=known.LOSS_AGG_MODES)
    loss_scale_factor: int | None = key(
        None,
        "divisor of seq-mean-token-sum-norm; default: data.max_response_length",
        ge=1,
        follows="data.max_response_length",
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "policy loss")
    use_torch_compile: bool = key(False, "compile the model; falls back with a notice where that fails")
    ulysses_sequence_parallel_size: int = key(1, "ranks that split each sequence by attention heads", ge=1)
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    megatron: MegatronConfig = section(MegatronConfig, "megatron's parallel sizes")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")


@dataclass
class RefConfig:
    """The frozen reference policy (the model before training; adapters off under LoRA)."""

    strategy: str = key(
        "fsdp",
        "engine; default: the actor's",
        known=known.STRATEGIES,
        follows="actor_rollout_ref.actor.strategy",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per forward pass; default: measured", ge=1
    )
    log_prob_use_dynamic_bsz: bool = key(
        False, "cut by tokens; default: the actor's", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "token budget; default: the actor's",
        ge=1,
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "ranks that split each sequence; default: the actor's",
        ge=1,
        follows="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    megatron: MegatronConfig = section(MegatronConfig, "megatron's parallel sizes")


@dataclass
class CriticConfig:
    """The value model; used by the estimators that need one (gae)."""

    enable: bool | None = key(None, "train a critic; default: when the estimator needs one")
    strategy: str = key(
        "fsdp",
        "engine; default: the actor's",
        known=known.STRATEGIES,
        follows="actor_rollout_ref.actor.strategy",
    )
    model: ModelConfig = section(ModelConfig, "the model the value head sits on; default path: the actor's")
    optim: OptimConfig = section(OptimConfig, "optimiser and schedule", lr=1e-5)
    ppo_mini_batch_size: int = key(
        256,
        "prompts per optimiser step; default: the actor's",
        ge=1,
        follows="actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "sequences per training pass; default: measured", ge=1
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "sequences per pass without gradient; default: measured",
        ge=1,
        follows="critic.ppo_micro_batch_size_per_gpu",
    )
    use_dynamic_bsz: bool = key(
        False, "cut by tokens; default: the actor's", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        "token budget; default: the actor's",
        ge=1,
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    ppo_epochs: int = key(
        1, "passes over each batch; default: the actor's", ge=1, follows="actor_rollout_ref.actor.ppo_epochs"
    )
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping", ge=0)
    cliprange_value: float = key(
        0.5, "how far a value may move from the old one before its loss is clipped", ge=0
    )
    loss_agg_mode: str = key("token-mean", "how token losses become one number", known=known.LOSS_AGG_MODES)
    use_torch_compile: bool = key(False, "compile the model; falls back with a notice where that fails")
    ulysses_sequence_parallel_size: int = key(
        1,
        "ranks that split each sequence; default: the actor's",
        ge=1,
        follows="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    megatron: MegatronConfig = section(MegatronConfig, "megatron's parallel sizes")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what checkpoints hold")
