"""Final values: keys that follow others, defaults that depend on the batch, home folders.

Only keys the user did not set change. Afterwards no consumer has to know what follows what.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from verl.config.keys import get, put, schema_keys
from verl.config.known import CRITIC_ESTIMATORS
from verl.config.ranks import divisors
from verl.config.schema import AnyConfig, GenerationConfig, PPOConfig, SFTConfig

# What the critic's model takes from the actor's while its path is not given: it is then the same model.
_CRITIC_MODEL_FOLLOWS = (
    "path", "tokenizer_path", "dtype", "enable_gradient_checkpointing", "enable_activation_offload",
    "use_remove_padding", "trust_remote_code", "override_config",
)  # fmt: skip


def finalize(config: AnyConfig) -> list[str]:
    """Fill in, in place, what the user left open; returns notices for the user."""
    _expand_home(config)
    notices = _mini_batch(config) if isinstance(config, PPOConfig) else []
    _follow(config)
    if isinstance(config, PPOConfig):
        _ppo(config)
    if isinstance(config, (PPOConfig, SFTConfig)):
        _run_folder(config)
    if isinstance(config, (PPOConfig, GenerationConfig)):
        rollout = config.rollout if isinstance(config, GenerationConfig) else config.actor_rollout_ref.rollout
        if rollout.max_model_len is None:
            rollout.max_model_len = config.data.max_prompt_length + config.data.max_response_length
    return notices


def fit_batch(config: PPOConfig | SFTConfig, rows: int) -> list[str]:
    """Lower a batch size the user did not choose to what the data gives, with what follows from it; returns notices."""
    name, default = "data.train_batch_size", config.data.train_batch_size
    if name in config.user_set or not 0 < rows < default:
        return []
    size = rows
    if isinstance(config, PPOConfig):
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
        if rows >= mini:
            size = rows // mini * mini
        elif "actor_rollout_ref.actor.ppo_mini_batch_size" in config.user_set:
            return []
    config.data.train_batch_size = size
    notices = [f"{name}={size} (there are {rows} usable rows, fewer than the default of {default})"]
    if isinstance(config, PPOConfig):
        notices += _mini_batch(config)
        _follow(config)
    return notices


def _run_folder(config: PPOConfig | SFTConfig) -> None:
    trainer = config.trainer
    if not trainer.default_local_dir:
        trainer.default_local_dir = f"checkpoints/{trainer.project_name}/{trainer.experiment_name}"
    if trainer.resume_from_path and "trainer.resume_mode" not in config.user_set:
        trainer.resume_mode = "resume_path"


def _expand_home(section: Any) -> None:
    """A leading ~ in paths is the user's home folder."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            _expand_home(value)
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for item in value:
                _expand_home(item)
        elif field.metadata.get("path"):
            is_list = isinstance(value, list)
            setattr(section, field.name, [_home(each) for each in value] if is_list else _home(value))


def _home(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def _follow(config: AnyConfig) -> None:
    keys = schema_keys(type(config))
    for key in keys.values():
        source = key
        while source.metadata["follows"] and source.name not in config.user_set:
            source = keys[source.metadata["follows"]]
        if source is not key:
            put(config, key.name, get(config, source.name))


def _mini_batch(config: PPOConfig) -> list[str]:
    """A mini-batch the user did not choose fits the batch they did choose."""
    name = "actor_rollout_ref.actor.ppo_mini_batch_size"
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    default = actor.ppo_mini_batch_size
    if name in config.user_set or prompts < 1 or prompts % default == 0:
        return []
    actor.ppo_mini_batch_size = max(size for size in divisors(prompts) if size <= default)
    return [
        f"{name}={actor.ppo_mini_batch_size} (the default {default} does not fit data.train_batch_size={prompts})"
    ]


def _ppo(config: PPOConfig) -> None:
    policy, critic = config.actor_rollout_ref, config.critic
    if not critic.model.path:
        for name in _CRITIC_MODEL_FOLLOWS:
            if f"critic.model.{name}" not in config.user_set:
                setattr(critic.model, name, getattr(policy.model, name))
    if critic.enable is None:
        critic.enable = config.algorithm.adv_estimator in CRITIC_ESTIMATORS
    _validation_sampling(config)


def _validation_sampling(config: PPOConfig) -> None:
    """`do_sample` and `temperature` say the same thing; whichever the user gave decides."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    prefix = "actor_rollout_ref.rollout.val_kwargs."
    if prefix + "do_sample" not in config.user_set:
        val.do_sample = val.temperature > 0
    elif prefix + "temperature" not in config.user_set:
        val.temperature = 1.0 if val.do_sample else 0.0
