"""Models, and what trains on them: the policy, the reference, the critic, the implicit reward model."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.capabilities import STRATEGIES
from verl.config.keys import Conditions, Section, key, section, shared
from verl.config.methods import POLICY_LOSS, PREFERENCE_LOSS, builtin_names, read_by
from verl.config.sections.algorithm import KL_TYPES

MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "sdpa", "varlen", "flex", "cudnn", "fa4")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class ModelConfig:
    """A Hugging Face model folder and what is done to it on loading."""

    path: str = key("", "Hugging Face model folder or id", required=True, path=True)
    tokenizer_path: str | None = key(None, "folder of the tokenizer; default: the model's", path=True)
    dtype: str = key("auto", "auto: bfloat16 on a GPU, float32 on a CPU", known=MODEL_DTYPES)
    enable_gradient_checkpointing: bool = key(False, "recompute activations in the backward pass")
    enable_activation_offload: bool = key(False, "keep activations in host memory", used_if="@gpu")
    use_remove_padding: bool = key(True, "pack sequences without padding; False: padded micro-batches")
    share_prefixes: bool = key(
        True,
        "compute common beginnings of rows, such as a group's prompt, once",
        used_if=".use_remove_padding",
    )
    attention_backend: str = key(
        "auto",
        "kernel of packed attention; auto: the fastest installed for a pack's shape (cudnn, fa4: extra attention)",
        known=ATTENTION_BACKENDS,
        used_if=".use_remove_padding",
    )
    peft_type: str = key("lora", "kind of adapter", known=("lora",), used_if=".lora_rank")
    lora_rank: int = key(0, "rank of the LoRA adapters; 0: train all weights", ge=0)
    lora_alpha: int = key(
        16, "the adapter's output is multiplied by lora_alpha / lora_rank", ge=1, used_if=".lora_rank"
    )
    target_modules: list[str] = key(
        ["all-linear"], "modules that get an adapter, by name", used_if=".lora_rank"
    )
    freeze_embeddings: bool = key(False, "do not train the input embeddings", used_if="!.lora_rank")
    trust_remote_code: bool = key(False, "run the model's own Python code; only if you trust it")
    override_config: dict[str, Any] = key({}, "entries that replace those of the model's config.json")
    external_lib: list[str] = key([], "modules to import first (register your own models, losses)")


@dataclass
class OptimConfig:
    """The optimiser and its schedule."""

    name: str = key(
        "adamw", "muon: for the matrices of the layers, AdamW for the rest", known=("adamw", "muon")
    )
    lr: float = key(1e-6, "learning rate after warm-up", ge=0)
    weight_decay: float = key(0.01, "decoupled weight decay", ge=0)
    betas: list[float] = key([0.9, 0.999], "decay of the first and second moment", ge=0, le=1)
    eps: float = key(1e-8, "added to the denominator of the update", gt=0)
    lr_scheduler_type: str = key("constant", "schedule after warm-up", known=("constant", "cosine", "linear"))
    lr_warmup_steps: int = key(-1, "optimiser steps of linear warm-up; -1: take lr_warmup_steps_ratio", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all optimiser steps", ge=0, le=1)
    min_lr_ratio: float = key(0.0, "final share of lr", ge=0, le=1, used_if=".lr_scheduler_type!=constant")
    momentum: float = key(0.95, "of Muon", ge=0, le=1, used_if=".name=muon")
    moments: str = key("float32", "storage of the moments; int8 saves memory", known=("float32", "int8"))
    stochastic_rounding: bool = key(
        False, "update 16-bit weights without float32 master copies", used_if="@16bit"
    )

    @property
    def state_bytes(self) -> int:
        """For each weight, besides master weights; those that Muon leaves to AdamW have more."""
        return 4 if self.name == "muon" else 2 if self.moments == "int8" else 8

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if len(self.betas) != 2 or max(self.betas) >= 1:
            yield f"'{name}.betas' is {self.betas}; it must be two numbers of at least 0 and below 1"
        if self.name == "muon" and (self.moments != "float32" or self.stochastic_rounding):
            yield (
                f"'{name}.name' is muon, whose momentum and master weights are float32; set '{name}.moments' to "
                f"float32 and '{name}.stochastic_rounding' to False, or '{name}.name' to adamw"
            )
        if self.lr_warmup_steps >= 0 and self.lr_warmup_steps_ratio > 0:
            yield (
                f"'{name}.lr_warmup_steps' is {self.lr_warmup_steps} and '{name}.lr_warmup_steps_ratio' is "
                f"{self.lr_warmup_steps_ratio:g}; keep one of them"
            )


@dataclass
class SFTOptimConfig(OptimConfig):
    """The optimiser for supervised fine-tuning."""

    lr: float = key(1e-5, "learning rate after warm-up", ge=0)
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping", ge=0)


@dataclass
class FSDPConfig:
    """Sharding with fully_shard."""

    param_offload: bool = key(
        False, "keep idle parameters in host memory", used_if=("!.offload_policy", "@gpu")
    )
    optimizer_offload: bool = key(
        False, "keep idle optimiser state in host memory", used_if=("!.offload_policy", "@gpu")
    )
    offload_policy: bool = key(False, "keep all shards in host memory all the time", used_if="@gpu")
    fsdp_size: int = key(
        -1, "ranks that share the weights; -1: all", ge=-1, used_if="@ranks or .offload_policy"
    )
    reshard_after_forward: bool = key(
        True, "free gathered weights after the forward pass", used_if="@ranks or .offload_policy"
    )


@dataclass
class MegatronConfig:
    """Parallel sizes of the megatron strategy, and what it keeps in host memory."""

    tensor_model_parallel_size: int = key(1, "ranks that split each matrix", ge=1)
    pipeline_model_parallel_size: int = key(1, "ranks that split the layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "no effect: a pipeline stage has one block of layers", ge=1, used_if="@never"
    )
    context_parallel_size: int = key(1, "ranks that split each sequence", ge=1)
    expert_model_parallel_size: int = key(1, "ranks that split the experts", ge=1)
    sequence_parallel: bool = key(
        False, "split norms along the sequence in a tensor-parallel group; only False"
    )
    param_offload: bool = key(False, "keep idle parameters in host memory", used_if="@gpu")
    optimizer_offload: bool = key(False, "keep idle optimiser state in host memory", used_if="@gpu")


HF_BY_DEFAULT_BELOW = 10_000_000_000  # parameters from which on checkpoints leave hf_model out by default


@dataclass
class CheckpointConfig:
    """What a checkpoint holds and how it is written."""

    save_contents: list[str] | None = key(
        None, "default: model, optimizer, extra, and hf_model below 10B", known=SAVE_CONTENTS
    )
    load_contents: list[str] | None = key(None, "to load on resume; default: all", known=SAVE_CONTENTS)
    async_save: bool = key(False, "copy to host memory and write in the background")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if self.load_contents is not None and "model" not in self.load_contents:
            yield (
                f"'{name}.load_contents' is {self.load_contents}: a resumed run would continue with the weights it "
                "began with; add model"
            )


@dataclass
class ShardingConfig:
    """The engine of a model and how its weights are split over ranks."""

    strategy: str = key("fsdp", "training engine", known=STRATEGIES, plugin="strategy")
    ulysses_sequence_parallel_size: int = key(1, "ranks that split each sequence by attention heads", ge=1)
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding", used_if=".strategy!=megatron")
    megatron: MegatronConfig = section(
        MegatronConfig, "megatron's parallel sizes", used_if=".strategy=megatron"
    )


@dataclass
class TrainEngineConfig(ShardingConfig):
    """The engine that trains a model."""

    use_torch_compile: bool = key(False, "compile the model; falls back with a notice where that fails")
    use_cuda_graphs: bool = key(
        True,
        "capture passes over few tokens; keeps their memory, a fifth of the device at most",
        used_if=("@gpu", ".strategy!=megatron"),
    )


@dataclass
class SFTModelConfig(TrainEngineConfig, ModelConfig):
    """The model of supervised fine-tuning, with the engine that trains it."""


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
    skip_zero_advantage: bool | None = key(
        None, "do not compute rows with advantage zero; default: where no other term reaches the loss"
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
    """The teacher of distillation; whatever is not said here is as in `actor_rollout_ref.model`."""

    source: str = key(
        "path",
        "its weights: those at path, the policy's at its start, or the policy's current ones",
        known=("path", "start", "current"),
    )
    prompt_template: str | None = key(
        None,
        "what the teacher reads in place of the last user message: a text with {prompt}, {ground_truth}, "
        "{extra_info[NAME]} and columns of the row; default: what the student reads",
    )
    kl: str = key(
        "reverse",
        "reverse: KL(student || teacher); forward: the other way round; jensen_shannon: the mean KL of both to their "
        "mean",
        known=("reverse", "forward", "jensen_shannon"),
    )
    clip: float | None = key(None, "a token's KL counts at most so much; default: no bound", gt=0)
    coef: float = key(
        0.0,
        "add the KL to the policy loss with this coefficient; loss_mode=distillation has it as the loss",
        ge=0,
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
