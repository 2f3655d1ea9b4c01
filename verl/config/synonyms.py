"""Words of other trainers for our keys and values: not accepted, but the answer to an unknown one is then useful."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from verl.config.known import ESTIMATORS, POLICY_LOSSES

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"

_RATE = (f"{_ACTOR}.optim.lr", "critic.optim.lr", "optim.lr")
_MODEL_PATH = (f"{_MODEL}.path", "model.path")
_STEPS = ("trainer.total_training_steps",)
_EPOCHS = ("trainer.total_epochs",)
_TRAIN, _VAL = ("data.train_files",), ("data.val_files",)
_FOLDER = ("trainer.default_local_dir",)
_N = (f"{_ROLLOUT}.n",)
_RESPONSE = ("data.max_response_length", "data.max_length")
_WHOLE = ("data.max_length", "data.max_prompt_length", "data.max_response_length")
_MICRO = (
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "data.micro_batch_size_per_gpu",
)
_KL = (f"{_ACTOR}.kl_loss_coef", "algorithm.kl_ctrl.kl_coef")
_REWARD = ("reward.custom_reward_function.path",)
_CLIP = (f"{_ACTOR}.clip_ratio",)
_RESUME = ("trainer.resume_mode", "trainer.resume_from_path")

_WORDS: dict[str, tuple[str, ...]] = {
    "lr": _RATE,
    "learning_rate": _RATE,
    "actor_lr": _RATE[:1],
    "critic_lr": _RATE[1:2],
    "batch_size": ("data.train_batch_size",),
    "rollout_batch_size": ("data.train_batch_size",),
    "global_batch_size": ("data.train_batch_size",),
    "mini_batch_size": (f"{_ACTOR}.ppo_mini_batch_size",),
    "micro_batch_size": _MICRO,
    "per_device_train_batch_size": _MICRO,
    "gradient_accumulation_steps": _MICRO,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "steps": _STEPS,
    "max_steps": _STEPS,
    "num_steps": _STEPS,
    "total_steps": _STEPS,
    "model": _MODEL_PATH,
    "model_name": _MODEL_PATH,
    "model_path": _MODEL_PATH,
    "model_name_or_path": _MODEL_PATH,
    "pretrained": _MODEL_PATH,
    "tokenizer": (f"{_MODEL}.tokenizer_path", "model.tokenizer_path"),
    "dataset": _TRAIN,
    "train_file": _TRAIN,
    "train_data": _TRAIN,
    "data_path": _TRAIN,
    "val_file": _VAL,
    "test_files": _VAL,
    "eval_files": _VAL,
    "eval_dataset": _VAL,
    "output_dir": _FOLDER,
    "output": _FOLDER,
    "save_dir": _FOLDER,
    "save_path": _FOLDER,
    "checkpoint_dir": _FOLDER,
    "num_generations": _N,
    "num_return_sequences": _N,
    "num_samples": _N,
    "group_size": _N,
    "max_new_tokens": _RESPONSE,
    "max_tokens": _RESPONSE,
    "max_completion_length": _RESPONSE,
    "max_length": _WHOLE,
    "max_seq_length": _WHOLE,
    "max_seq_len": _WHOLE,
    "beta": _KL,
    "kl_coef": _KL,
    "kl_beta": _KL,
    "reward_fn": _REWARD,
    "reward_func": _REWARD,
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    "save_steps": ("trainer.save_freq",),
    "save_interval": ("trainer.save_freq",),
    "eval_steps": ("trainer.test_freq",),
    "eval_interval": ("trainer.test_freq",),
    "warmup_steps": (f"{_ACTOR}.optim.lr_warmup_steps", "optim.lr_warmup_steps"),
    "warmup_ratio": (f"{_ACTOR}.optim.lr_warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
    "max_grad_norm": (f"{_ACTOR}.grad_clip", "optim.grad_clip"),
    "epsilon": _CLIP,
    "clip_range": _CLIP,
    "cliprange": _CLIP,
    "lora_r": (f"{_MODEL}.lora_rank", "model.lora_rank"),
    "gradient_checkpointing": (
        f"{_MODEL}.enable_gradient_checkpointing",
        "model.enable_gradient_checkpointing",
    ),
    "report_to": ("trainer.logger",),
    "use_wandb": ("trainer.logger",),
    "wandb": ("trainer.logger",),
    "run_name": ("trainer.experiment_name",),
    "algo": ("algorithm.adv_estimator",),
    "estimator": ("algorithm.adv_estimator",),
    "engine": (f"{_ROLLOUT}.name",),
    "gpus": ("trainer.n_gpus_per_node",),
    "num_gpus": ("trainer.n_gpus_per_node",),
    "n_gpus": ("trainer.n_gpus_per_node",),
    "nodes": ("trainer.nnodes",),
    "num_nodes": ("trainer.nnodes",),
    "resume": _RESUME,
    "resume_from_checkpoint": _RESUME,
}

_VALUES: dict[tuple[str, str], str] = {
    ("adv_estimator", "ppo"): "'gae', which is PPO with a critic",
    ("adv_estimator", "dapo"): (
        "'grpo' with actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=True"
    ),
    ("adv_estimator", "drgrpo"): "'grpo' with algorithm.norm_adv_by_std_in_grpo=False",
    ("adv_estimator", "reinforce++"): "'reinforce_plus_plus'",
    ("adv_estimator", "reinforce"): "'reinforce_plus_plus'",
    ("device", "gpu"): "'cuda'",
    ("device", "cuda:0"): "'cuda' (CUDA_VISIBLE_DEVICES=0 chooses the GPU)",
    ("name", "transformers"): "'hf'",
    ("name", "huggingface"): "'hf'",
}
"""What a value of a key (by its last name) probably means."""

_PREFERENCES = (
    "trains on preferences and has no advantages to estimate; preference training is not available in this version "
    "(`verl sft` trains on the chosen responses alone)"
)
_OTHER_KINDS: dict[tuple[str, str], str] = {
    **{
        ("adv_estimator", name): _PREFERENCES
        for name in ("dpo", "online_dpo", "ipo", "kto", "simpo", "orpo", "cpo", "spin", "sppo")
    },
    ("adv_estimator", "prime"): (
        "is a recipe with rewards per token, which is not available in this version; "
        "reward.reward_manager.name=prime scores in several processes"
    ),
    **{
        ("adv_estimator", name): (
            f"is a policy loss: set actor_rollout_ref.actor.policy_loss.loss_mode={name} with an estimator such as grpo"
        )
        for name in POLICY_LOSSES
        if name not in ESTIMATORS
    },
    **{
        ("loss_mode", name): f"is an advantage estimator: set algorithm.adv_estimator={name}"
        for name in ESTIMATORS
        if name not in POLICY_LOSSES
    },
    **{
        ("strategy", name): "is not available; fsdp shards weights, gradients and optimiser over the ranks"
        for name in ("ddp", "deepspeed", "zero", "zero2", "zero3", "torchtitan", "veomni")
    },
    (
        "mode",
        "async",
    ): "is rollout.mode=server here (vllm and sglang); asynchronous training is not available",
    ("mode", "sync"): "is rollout.mode=inprocess here",
}
"""Values that belong to another key, or to something this version does not have, and what to do instead."""

_FEATURES: dict[str, tuple[str, ...]] = {
    "asynchronous training (one step off-policy, fully async, partial rollouts) is not available in this version: "
    "generating and training take turns": (
        "async_training",
        "async_mode",
        "async_rollout",
        "one_step_off",
        "one_step_off_policy",
        "fully_async",
        "partial_rollout",
        "staleness",
        "staleness_threshold",
        "trigger_parameter_sync_step",
        "require_batches",
        "trainer_mode",
    ),
    "training over several turns, with tools or agents, is not available in this version": (
        "agent",
        "agent_loop",
        "interaction_config_path",
    ),
    "training on preferences (DPO and its relatives) is not available in this version": (
        "chosen_key",
        "rejected_key",
        "dpo",
        "online_dpo",
    ),
    "recipes are not available in this version; docs/algorithms.md has the keys of each algorithm": (
        "recipe",
    ),
}
"""What this version does not have, and the parts of names by which other trainers ask for it."""


def other_kind(key: str, value: str) -> str:
    """What a value is, where it is no value of this key but something else; empty where it is not known."""
    lowered = value.lower().replace("-", "_")
    return _OTHER_KINDS.get((key.rpartition(".")[2], lowered), "")


def missing_feature(name: str) -> str:
    """That an unknown key belongs to something this version does not have; empty where it does not."""
    parts = set(name.lower().split("."))
    return next((text for text, words in _FEATURES.items() if parts & set(words)), "")


def value_meant(key: str, value: str, allowed: Iterable[str]) -> str:
    """The value a user probably meant, with what else belongs to it; empty where nothing is near."""
    lowered = value.lower().replace("-", "_")
    said = _VALUES.get((key.rpartition(".")[2], lowered))
    if said:
        return said
    names = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(lowered, names, 1)
    return f"'{names[close[0]]}'" if close else ""


def meant(name: str, known: Iterable[str]) -> list[str]:
    """Keys, of those known, that an unknown name probably means; those of its own section first."""
    first, last = name.partition(".")[0], name.rpartition(".")[2].lower()
    allowed = set(known)
    spelt = next((word for word in (last, f"{last}s", last.removesuffix("s")) if word in _WORDS), "")
    found = [key for key in _WORDS.get(spelt, ()) if key in allowed]
    return sorted(found, key=lambda key: key.partition(".")[0] != first)


def words() -> dict[str, tuple[str, ...]]:
    """Every word and what it may mean in one config or the other."""
    return dict(_WORDS)
