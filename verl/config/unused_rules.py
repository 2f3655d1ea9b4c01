"""Which keys have no effect when, and why: the table behind `verl.config.unused`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from verl.config import known
from verl.config.keys import get
from verl.config.pools import EXTERNAL_ENGINES, rollout_pool
from verl.config.ranks import world_size
from verl.config.schema import PPOConfig, SFTConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_LOSS = f"{_ACTOR}.policy_loss"

_LOSS_KEYS = {
    "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "seed"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "sapo": ("tau_pos", "tau_neg"),
    "dro": ("beta",),
}
_SEQUENCE_LOSSES = ("gspo", "sapo")
"""Losses that are always aggregated seq-mean-token-mean."""
_DUAL_CLIP_LOSSES = ("vanilla", "dppo_tv", "dppo_kl")
_STD_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
_DISCOUNTING_ESTIMATORS = ("gae", "reinforce_plus_plus")


@dataclass(frozen=True)
class Rule:
    """`keys` have no effect when `unless` does not hold, because of `why` (may name {values} of keys)."""

    keys: tuple[str, ...]
    unless: Callable[[Any], bool]
    why: str


def _under(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _on_ray(config: PPOConfig | SFTConfig) -> bool:
    """Whether the run has processes beside this one: ranks, or rollout or a reward model on GPUs of its own."""
    own = isinstance(config, PPOConfig) and (
        config.reward.reward_model.n_gpus_per_node > 0 or rollout_pool(config)
    )
    return own or world_size(config) > 1


def _engine_beside(config: PPOConfig | SFTConfig) -> bool:
    """Whether generation has processes of its own without Ray: a server, or workers that share a model."""
    if not isinstance(config, PPOConfig):
        return False
    rollout = config.actor_rollout_ref.rollout
    return rollout.name in EXTERNAL_ENGINES and (
        rollout.mode == "server" or rollout.tensor_model_parallel_size > 1
    )


def _uses_reference(config: PPOConfig) -> bool:
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def _both_clips(config: PPOConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.clip_ratio_low is not None and actor.clip_ratio_high is not None


def _loss_is(*modes: str) -> Callable[[PPOConfig], bool]:
    """Whether the loss is one of these, or not ours: a user's own loss may read any key of its section."""
    return lambda config: (
        config.actor_rollout_ref.actor.policy_loss.loss_mode in modes
        or (config.actor_rollout_ref.actor.policy_loss.loss_mode not in known.POLICY_LOSSES)
    )


def _estimator_is(*names: str) -> Callable[[PPOConfig], bool]:
    return lambda config: (
        config.algorithm.adv_estimator in names or (config.algorithm.adv_estimator not in known.ESTIMATORS)
    )


def _engine_is(*names: str) -> Callable[[PPOConfig], bool]:
    return lambda config: (
        config.actor_rollout_ref.rollout.name in names
        or (config.actor_rollout_ref.rollout.name not in known.ROLLOUT_ENGINES)
    )


def _budget_rules(role: str, dynamic: str, sequences: Iterable[str], tokens: str) -> tuple[Rule, Rule]:
    """Micro-batches are cut either by sequences or by tokens."""
    return (
        Rule(
            tuple(sequences),
            lambda c: not get(c, dynamic),
            f"{dynamic}=True cuts micro-batches by tokens ({tokens})",
        ),
        Rule(
            (tokens,),
            lambda c: get(c, dynamic),
            f"{dynamic} is False; set it to True to cut micro-batches by tokens",
        ),
    )


def _optim_rules(optim: str) -> tuple[Rule, ...]:
    return (
        Rule(
            _under(optim, "min_lr_ratio"),
            lambda c: get(c, optim).lr_scheduler_type != "constant",
            f"{optim}.lr_scheduler_type is constant; cosine and linear end at min_lr_ratio",
        ),
    )


def _sharding_rules(role: str) -> tuple[Rule, ...]:
    return (
        Rule(
            _under(role, "megatron"),
            lambda c: get(c, role).strategy == "megatron",
            f"{role}.strategy is not megatron",
        ),
        Rule(
            _under(role, "fsdp_config"),
            lambda c: get(c, role).strategy != "megatron",
            f"{role}.strategy is megatron",
        ),
        Rule(
            _under(role, "fsdp_config.param_offload", "fsdp_config.optimizer_offload"),
            lambda c: not get(c, role).fsdp_config.offload_policy,
            f"{role}.fsdp_config.offload_policy=True keeps everything in host memory already",
        ),
        Rule(
            _under(role, "fsdp_config.fsdp_size", "fsdp_config.reshard_after_forward"),
            lambda c: world_size(c) > 1 or get(c, role).fsdp_config.offload_policy,
            "one process has nothing to shard",
        ),
    )


def _lora_rules(model: str) -> tuple[Rule, ...]:
    return (
        Rule(
            _under(model, "lora_alpha", "target_modules", "peft_type"),
            lambda c: get(c, model).lora_rank > 0,
            f"{model}.lora_rank is 0, so all weights are trained; set it, e.g. {model}.lora_rank=16",
        ),
        Rule(
            _under(model, "freeze_embeddings"),
            lambda c: get(c, model).lora_rank == 0,
            f"{model}.lora_rank > 0 trains adapters only",
        ),
    )


_TRAINER_RULES = (
    Rule(
        ("trainer.prometheus.port", "trainer.prometheus.host"),
        lambda c: c.trainer.prometheus.enable,
        "trainer.prometheus.enable is False",
    ),
    Rule(
        ("trainer.wandb_proxy",), lambda c: "wandb" in c.trainer.logger, "trainer.logger does not name wandb"
    ),
    Rule(
        ("trainer.keep_best_mode",), lambda c: bool(c.trainer.keep_best), "trainer.keep_best names no metric"
    ),
    Rule(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode == "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    Rule(("trainer.test_freq",), lambda c: bool(c.data.val_files), "there are no data.val_files"),
    Rule(("ray_kwargs",), _on_ray, "one process runs without Ray"),
    Rule(
        ("trainer.max_restarts", "trainer.watchdog_s"),
        lambda c: _on_ray(c) or _engine_beside(c),
        "one process has no workers that could die",
    ),
    Rule(("data.val_max_samples",), lambda c: bool(c.data.val_files), "there are no data.val_files"),
    Rule(
        ("data.seed",),
        lambda c: c.data.shuffle or bool(getattr(c.data, "mixture", None)),
        "data.shuffle is False, so nothing is drawn",
    ),
)

REWARD_RULES: tuple[Rule, ...] = (
    Rule(
        _under("reward", "custom_reward_function.name"),
        lambda c: bool(c.reward.custom_reward_function.path),
        "reward.custom_reward_function.path is not set",
    ),
    Rule(
        _under("reward", "num_workers", "memory_limit_mb"),
        lambda c: not c.reward.in_process,
        "reward.in_process=True calls the function in the trainer's process",
    ),
    Rule(
        _under("reward.overlong_buffer", "len", "penalty_factor", "log"),
        lambda c: c.reward.overlong_buffer.enable,
        "reward.overlong_buffer.enable is False",
    ),
    Rule(
        ("reward.reward_model",),
        lambda c: c.reward.reward_model.enable,
        "reward.reward_model.enable is False",
    ),
    Rule(
        ("reward.reward_model.rollout",),
        lambda c: False,
        "a classification model generates nothing; it runs through transformers, on the trainer's GPUs or on "
        "reward.reward_model.n_gpus_per_node of its own",
    ),
    Rule(
        ("reward.reward_model.param_offload",),
        lambda c: not c.reward.reward_model.n_gpus_per_node,
        "the reward model has GPUs of its own and stays on them",
    ),
    Rule(("reward.judge",), lambda c: bool(c.reward.judge.base_url), "reward.judge.base_url is not set"),
)

SFT_RULES: tuple[Rule, ...] = (
    *_TRAINER_RULES,
    *_budget_rules(
        "data", "data.use_dynamic_bsz", ["data.micro_batch_size_per_gpu"], "data.max_token_len_per_gpu"
    ),
    *_optim_rules("optim"),
    *_sharding_rules("model"),
    *_lora_rules("model"),
)

PPO_RULES: tuple[Rule, ...] = (
    *_TRAINER_RULES,
    Rule(
        ("data.return_raw_input_ids",),
        lambda c: False,
        "the prompt's messages are always kept, and a reward model encodes them with its own template",
    ),
    Rule(("data.train_files",), lambda c: not c.data.mixture, "data.mixture replaces it"),
    Rule(
        ("data.truncation",),
        lambda c: not c.data.filter_overlong_prompts,
        "filter_overlong_prompts drops longer prompts",
    ),
    Rule(
        _under("data", "filter_overlong_prompts_workers", "cache_dir"),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts is False",
    ),
    Rule(
        ("data.response_key",),
        lambda c: False,
        "responses are generated here; it names a column for SFT and evaluation",
    ),
    # the policy loss
    *(
        Rule(_under(_LOSS, *keys), _loss_is(mode), f"only {_LOSS}.loss_mode={mode} reads it")
        for mode, keys in _LOSS_KEYS.items()
    ),
    Rule(
        _under(_ACTOR, "clip_ratio", "clip_ratio_low", "clip_ratio_high"),
        _loss_is(*known.CLIPPING_LOSSES),
        f"the chosen {_LOSS}.loss_mode does not clip; these do: {', '.join(known.CLIPPING_LOSSES)}",
    ),
    Rule(
        _under(_ACTOR, "clip_ratio"),
        lambda c: not _both_clips(c),
        "clip_ratio_low and clip_ratio_high are both set and take its place",
    ),
    Rule(
        _under(_ACTOR, "clip_ratio_c"),
        _loss_is(*_DUAL_CLIP_LOSSES),
        f"only these values of {_LOSS}.loss_mode read it: {', '.join(_DUAL_CLIP_LOSSES)}",
    ),
    Rule(
        _under(_ACTOR, "loss_agg_mode"),
        lambda c: (
            c.actor_rollout_ref.actor.policy_loss.loss_mode not in _SEQUENCE_LOSSES
            or c.actor_rollout_ref.actor.entropy_coeff != 0
            or c.actor_rollout_ref.actor.use_kl_loss
        ),
        f"{' and '.join(_SEQUENCE_LOSSES)} always aggregate seq-mean-token-mean",
    ),
    Rule(
        _under(_ACTOR, "loss_scale_factor"),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm",
        f"only {_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by it",
    ),
    # KL and the reference policy
    Rule(
        _under(_ACTOR, "kl_loss_coef", "kl_loss_type"),
        lambda c: c.actor_rollout_ref.actor.use_kl_loss,
        f"{_ACTOR}.use_kl_loss is False; set it to True to add the KL to the loss",
    ),
    Rule(
        _under("algorithm", "kl_ctrl", "kl_penalty"),
        lambda c: c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is False; set it to True to take the KL off the reward",
    ),
    Rule(
        _under("algorithm.kl_ctrl", "horizon", "target_kl"),
        lambda c: c.algorithm.kl_ctrl.type == "adaptive",
        "algorithm.kl_ctrl.type is fixed",
    ),
    Rule(
        ("actor_rollout_ref.ref",),
        _uses_reference,
        f"there is no reference policy without {_ACTOR}.use_kl_loss or algorithm.use_kl_in_reward",
    ),
    Rule(
        ("actor_rollout_ref.ref",),
        lambda c: c.actor_rollout_ref.model.lora_rank == 0,
        f"with {_MODEL}.lora_rank > 0 the reference is the actor's own model with its adapters off",
    ),
    # advantages
    Rule(
        ("algorithm.gamma",),
        _estimator_is(*_DISCOUNTING_ESTIMATORS),
        f"only these estimators discount: {', '.join(_DISCOUNTING_ESTIMATORS)}",
    ),
    Rule(("algorithm.lam",), _estimator_is("gae"), "only algorithm.adv_estimator=gae reads it"),
    Rule(
        ("algorithm.norm_adv_by_std_in_grpo",),
        _estimator_is(*_STD_ESTIMATORS),
        f"only these estimators divide by it: {', '.join(_STD_ESTIMATORS)}",
    ),
    Rule(
        _under("algorithm", "gdpo_reward_keys", "gdpo_reward_weights"),
        _estimator_is("gdpo"),
        "only algorithm.adv_estimator=gdpo reads it",
    ),
    Rule(("critic",), lambda c: bool(c.critic.enable), "the chosen algorithm.adv_estimator has no critic"),
    Rule(
        _under("algorithm.filter_groups", "metric", "max_num_gen_batches"),
        lambda c: c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is False",
    ),
    Rule(("algorithm.pf_ppo",), lambda c: c.algorithm.use_pf_ppo, "algorithm.use_pf_ppo is False"),
    Rule(
        ("algorithm.pf_ppo.weight_pow",),
        lambda c: c.algorithm.pf_ppo.reweight_method == "pow",
        "algorithm.pf_ppo.reweight_method is not pow",
    ),
    Rule(
        _under("algorithm.rollout_correction", "rollout_is_threshold", "rollout_is_batch_normalize"),
        lambda c: bool(c.algorithm.rollout_correction.rollout_is),
        "algorithm.rollout_correction.rollout_is is not set",
    ),
    Rule(
        _under("algorithm.rollout_correction", "rollout_rs_threshold"),
        lambda c: bool(c.algorithm.rollout_correction.rollout_rs),
        "algorithm.rollout_correction.rollout_rs is not set",
    ),
    Rule(
        _under("algorithm.rollout_correction", "rollout_is", "rollout_rs"),
        lambda c: not c.algorithm.rollout_correction.bypass_mode,
        "in bypass_mode the rollout engine's log-probs are the old ones, so there is nothing to correct",
    ),
    # rollout
    Rule(
        _under(_ROLLOUT, "tensor_model_parallel_size", "mode"),
        _engine_is("vllm", "sglang"),
        f"{_ROLLOUT}.name native and hf generate in the trainer's process, one whole copy per rank",
    ),
    Rule(
        _under(_ROLLOUT, "engine_kwargs.vllm", "per_request_seed"),
        _engine_is("vllm"),
        f"{_ROLLOUT}.name is not vllm",
    ),
    Rule(_under(_ROLLOUT, "engine_kwargs.sglang"), _engine_is("sglang"), f"{_ROLLOUT}.name is not sglang"),
    Rule(
        _under(
            _ROLLOUT, "gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager", "free_cache_engine"
        ),
        _engine_is("native", "vllm", "sglang"),
        f"{_ROLLOUT}.name=hf has no paged cache and no CUDA graphs",
    ),
    Rule(
        _under(_ROLLOUT, "free_cache_engine"),
        lambda c: not rollout_pool(c),
        "rollout has GPUs of its own, whose memory nobody else needs",
    ),
    Rule(
        _under(_ROLLOUT, "multi_turn"),
        lambda c: c.actor_rollout_ref.rollout.multi_turn.enable,
        f"{_ROLLOUT}.multi_turn.enable is False",
    ),
    Rule(_under(_ROLLOUT, "val_kwargs"), lambda c: bool(c.data.val_files), "there are no data.val_files"),
    Rule(
        _under(f"{_ROLLOUT}.val_kwargs", "top_p", "top_k", "temperature"),
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        f"validation is greedy ({_ROLLOUT}.val_kwargs.do_sample=False)",
    ),
    *REWARD_RULES,
    # the run
    Rule(
        ("trainer.log_val_generations", "trainer.validation_data_dir", "trainer.val_before_train"),
        lambda c: bool(c.data.val_files),
        "there are no data.val_files",
    ),
    Rule(("trainer.balance_batch",), lambda c: world_size(c) > 1, "one process has nothing to balance"),
    Rule(("trainer.max_critic_ckpt_to_keep",), lambda c: bool(c.critic.enable), "there is no critic"),
    *_budget_rules(
        _ACTOR,
        f"{_ACTOR}.use_dynamic_bsz",
        [f"{_ACTOR}.ppo_micro_batch_size_per_gpu"],
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
    ),
    *_budget_rules(
        _ROLLOUT,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
        [f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"],
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    ),
    *_budget_rules(
        "actor_rollout_ref.ref",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"],
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    ),
    *_budget_rules(
        "critic",
        "critic.use_dynamic_bsz",
        ["critic.ppo_micro_batch_size_per_gpu", "critic.forward_micro_batch_size_per_gpu"],
        "critic.ppo_max_token_len_per_gpu",
    ),
    *_optim_rules(f"{_ACTOR}.optim"),
    *_optim_rules("critic.optim"),
    *_sharding_rules(_ACTOR),
    *_sharding_rules("critic"),
    *_sharding_rules("actor_rollout_ref.ref"),
    *_lora_rules(_MODEL),
    *_lora_rules("critic.model"),
)
