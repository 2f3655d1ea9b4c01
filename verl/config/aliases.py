"""Names that keys have in verl and in earlier versions, moved to ours with a notice.

Most are another spelling. Of some the value is converted too, and the names of `async_training` are applied to all
sources together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from verl.config.build import finite_number
from verl.config.keys import schema_keys
from verl.config.schema import (
    ActorConfig,
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RewardTrainingConfig,
    SessionConfig,
    SFTConfig,
)
from verl.config.sources import get_path, leaves, set_path, take_path
from verl.errors import ConfigError

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"

_OPTIM_ALIASES = {"lr_scheduler": "lr_scheduler_type", "warmup_steps_proportion": "lr_warmup_steps_ratio"}

_REWARD_ALIASES = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_fn": "reward.custom_reward_function",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.micro_batch_size_per_gpu": "reward.reward_model.micro_batch_size_per_gpu",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
}
_MULTI_TURN_ALIASES = {
    "max_assistant_turns": "max_turns",
    "tool_config_path": "tools",
    "interaction_config_path": "environment",
}
_RUN_ALIASES = {
    "trainer.nnode": "trainer.nnodes",
    "ray_init.timeline_file": "ray_kwargs.timeline_json_file",
    "ray_init": "ray_kwargs.ray_init",
}


def _attention_aliases(*models: str) -> dict[str, str]:
    names = ("attn_implementation", "override_config.attn_implementation")
    return {f"{model}.{name}": f"{model}.attention_backend" for model in models for name in names}


_PROMPT_ALIASES = {"data.raw_prompts": "data.apply_chat_template"}

# Old name to ours, longer ones before the sections that contain them.
_PPO_ALIASES: dict[str, str] = {
    **_attention_aliases(_MODEL, "critic.model"),
    f"{_ACTOR}.peft": _MODEL,
    f"{_ACTOR}.lora_rank": f"{_MODEL}.lora_rank",
    f"{_ACTOR}.lora_alpha": f"{_MODEL}.lora_alpha",
    f"{_ACTOR}.target_modules": f"{_MODEL}.target_modules",
    **{f"rollout.multi_turn.{old}": f"{_MULTI_TURN}.{new}" for old, new in _MULTI_TURN_ALIASES.items()},
    **{f"{_MULTI_TURN}.{old}": f"{_MULTI_TURN}.{new}" for old, new in _MULTI_TURN_ALIASES.items()},
    "rollout": "actor_rollout_ref.rollout",
    "async_training.staleness_threshold": "trainer.async_training.staleness",
    "async_training.trigger_parameter_sync_step": "trainer.async_training.sync_every",
    "async_training": "trainer.async_training",
    "trainer.v1.trainer_mode": "trainer.async_training.mode",
    **_REWARD_ALIASES,
    **_RUN_ALIASES,
    **_PROMPT_ALIASES,
    "critic.model.fsdp_config": "critic.fsdp_config",
    **{f"{_ACTOR}.optim.{old}": f"{_ACTOR}.optim.{new}" for old, new in _OPTIM_ALIASES.items()},
    **{f"critic.optim.{old}": f"critic.optim.{new}" for old, new in _OPTIM_ALIASES.items()},
}

_SFT_ALIASES: dict[str, str] = {
    **_RUN_ALIASES,
    **_attention_aliases("model"),
    "model.partial_pretrain": "model.path",
    "use_remove_padding": "model.use_remove_padding",
    "ulysses_sequence_parallel_size": "model.ulysses_sequence_parallel_size",
    "optim.clip_grad": "optim.grad_clip",
    **{f"optim.{old}": f"optim.{new}" for old, new in _OPTIM_ALIASES.items()},
}

# The sections of training first, so that keys in the messages of engines can be typed as they are.
_GENERATION_ALIASES: dict[str, str] = {
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.rollout": "rollout",
    **{f"rollout.multi_turn.{old}": f"rollout.multi_turn.{new}" for old, new in _MULTI_TURN_ALIASES.items()},
    "data.n_samples": "rollout.n",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.max_prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.max_response_length": "data.max_response_length",
    "model.dtype": "rollout.dtype",
    **_RUN_ALIASES,
    **_PROMPT_ALIASES,
}

ALIASES: dict[type, dict[str, str]] = {
    PPOConfig: _PPO_ALIASES,
    SessionConfig: _PPO_ALIASES,
    SFTConfig: {
        **_SFT_ALIASES,
        "data.multiturn.messages_key": "data.messages_key",
        "data.multiturn.tools_key": "data.tools_key",
    },
    DPOConfig: _SFT_ALIASES,
    RewardTrainingConfig: _SFT_ALIASES,
    GenerationConfig: _GENERATION_ALIASES,
    EvaluationConfig: _REWARD_ALIASES,
}

_MODES = {"sync": "off", "colocate_async": "carry_over", "separate_async": "fully_async"}
_MODE = "trainer.async_training.mode"
_BATCH = "data.train_batch_size"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_PARTIAL = "async_training.partial_rollout"
_REQUIRED_BATCHES = "async_training.require_batches"
# Any of these asks for fully_async where no mode is given.
_ASYNC_NAMES = ("staleness_threshold", "trigger_parameter_sync_step", "partial_rollout", "require_batches")


def _mode(name: str, value: Any) -> str:
    if value not in _MODES:
        known = ", ".join(f"{theirs} ({_MODE}={ours})" for theirs, ours in _MODES.items())
        raise ConfigError(f"'{name}' is {value!r}, which is not known. Known: {known}")
    return _MODES[value]


def _staleness(name: str, value: Any) -> int:
    return math.ceil(_number(name, value, 0.0, "a number, at least 0 (a share of a step's samples)"))


# What the value of another name is in ours, where that differs.
_CONVERTED: dict[str, Callable[[str, Any], Any]] = {
    "trainer.v1.trainer_mode": _mode,
    "async_training.staleness_threshold": _staleness,
    "data.raw_prompts": lambda name, value: "never" if _switch(name, value) else "auto",
}


def _switch(name: str, value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ConfigError(f"'{name}' is {value!r}; it must be true or false")
    return str(value).lower() == "true"


def _number(name: str, value: Any, least: float, allowed: str) -> float:
    number = None if isinstance(value, bool) else finite_number(value)
    if number is None or number < least:
        raise ConfigError(f"'{name}' is {value!r}; it must be {allowed}")
    return number


def resolve_aliases(kind: type, tree: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Move every aliased key of the tree (in place) to our name. Returns our name -> the name typed, and notices."""
    typed: dict[str, str] = {}
    notices: list[str] = []
    for name in (_PARTIAL, _REQUIRED_BATCHES) if kind is PPOConfig else ():
        take_path(tree, name)  # no keys of ours: see apply_async_names
    for old, new in ALIASES.get(kind, {}).items():
        found, theirs = take_path(tree, old)
        section = isinstance(theirs, Mapping) and theirs
        if not found or (theirs is None and new not in schema_keys(kind)):
            continue  # an empty section in a YAML file says nothing
        value = _CONVERTED[old](old, theirs) if old in _CONVERTED else theirs
        for below, leaf in leaves(theirs) if section else [((), value)]:
            ours, name = ".".join((new, *below)), ".".join((old, *below))
            _move(tree, (*new.split("."), *below), leaf, name, ours)
            typed[ours] = name
        changed = theirs != value
        notices.append(
            f"'{old}{f'={theirs}' if changed else ''}' is read as '{new}{f'={value}' if changed else ''}'"
        )
    return typed, notices


def _move(tree: dict[str, Any], path: tuple[str, ...], value: Any, old: str, new: str) -> None:
    """Put a value at a place that may already hold one."""
    *parents, last = path
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise ConfigError(
                f"'{parent}' (in '{new}') is a section, but it was given the value {tree[parent]!r}"
            )
        tree = tree[parent]
    if tree.get(last) is not None and tree[last] != value:
        raise ConfigError(
            f"'{old}' is another name of '{new}', and both are given: {value!r} and {tree[last]!r}. Keep one of them"
        )
    tree[last] = value


def our_name(kind: type, name: str) -> str:
    """What a key or section is called here."""
    for old, new in ALIASES.get(kind, {}).items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def apply_async_names(as_typed: Mapping[str, Any], tree: dict[str, Any]) -> list[str]:
    """Add what follows from the names in `async_training` to the values of all sources; returns notices."""
    given, notices = as_typed.get("async_training"), []
    if not isinstance(given, Mapping):
        return []
    if "partial_rollout" in given:
        always = f"with {_MODE}=fully_async running responses always take new weights"
        notices.append(
            f"'{_PARTIAL}=True' needs no key: {always}"
            if _switch(_PARTIAL, given["partial_rollout"])
            else f"'{_PARTIAL}=False' has no effect: {always}. {_MODE}=one_step_off sends them only when none is "
            "running"
        )
    if any(name in given for name in _ASYNC_NAMES) and get_path(tree, _MODE) is None:
        set_path(tree, _MODE, "fully_async")
        notices.append(f"'async_training' without a mode is read as '{_MODE}=fully_async'")
    if "require_batches" in given:
        asked, allowed = given["require_batches"], "a whole number, at least 1"
        batches = _number(_REQUIRED_BATCHES, asked, 1.0, allowed)
        if batches != int(batches):
            raise ConfigError(f"'{_REQUIRED_BATCHES}' is {asked!r}; it must be {allowed}")
        mini = get_path(tree, _MINI_BATCH) or ActorConfig().ppo_mini_batch_size
        size = int(_number(_MINI_BATCH, mini, 1.0, "a whole number")) * int(batches)
        other = get_path(tree, _BATCH)
        if other is not None and other != size:
            raise ConfigError(
                f"'{_REQUIRED_BATCHES}={int(batches)}' asks for {int(batches)} x {_MINI_BATCH}={mini} = {size} prompts "
                f"per step, and {_BATCH}={other} is given as well. Keep one of them"
            )
        set_path(tree, _BATCH, size)
        notices.append(f"'{_REQUIRED_BATCHES}={int(batches)}' is read as '{_BATCH}={size}'")
    return notices
