"""Other spellings of keys, from several years of documents, and what they mean here.

An alias moves a key or a section in the user's tree; each one used is reported once. A key in both spellings with
different values is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.config.keys import schema_keys
from verl.config.schema import EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.errors import ConfigError

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"

_OPTIM = {"lr_scheduler": "lr_scheduler_type", "warmup_steps_proportion": "lr_warmup_steps_ratio"}

_REWARD = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_fn": "reward.custom_reward_function",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.micro_batch_size_per_gpu": "reward.reward_model.micro_batch_size_per_gpu",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
}
_RUN = {
    "trainer.nnode": "trainer.nnodes",
    "ray_init.timeline_file": "ray_kwargs.timeline_json_file",
    "ray_init": "ray_kwargs.ray_init",
}

# Old name to ours, longer ones before the sections that contain them.
PPO_ALIASES: dict[str, str] = {
    f"{_ACTOR}.peft": _MODEL,
    f"{_ACTOR}.lora_rank": f"{_MODEL}.lora_rank",
    f"{_ACTOR}.lora_alpha": f"{_MODEL}.lora_alpha",
    f"{_ACTOR}.target_modules": f"{_MODEL}.target_modules",
    "rollout": "actor_rollout_ref.rollout",
    **_REWARD,
    **_RUN,
    "critic.model.fsdp_config": "critic.fsdp_config",
    **{f"{_ACTOR}.optim.{old}": f"{_ACTOR}.optim.{new}" for old, new in _OPTIM.items()},
    **{f"critic.optim.{old}": f"critic.optim.{new}" for old, new in _OPTIM.items()},
}

SFT_ALIASES: dict[str, str] = {
    **_RUN,
    "optim.clip_grad": "optim.grad_clip",
    **{f"optim.{old}": f"optim.{new}" for old, new in _OPTIM.items()},
}

# The sections of training first, so that keys in the messages of engines can be typed as they are.
GENERATION_ALIASES: dict[str, str] = {
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.rollout": "rollout",
    "data.n_samples": "rollout.n",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.max_prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.max_response_length": "data.max_response_length",
    "model.dtype": "rollout.dtype",
    **_RUN,
}

ALIASES: dict[type, dict[str, str]] = {
    PPOConfig: PPO_ALIASES,
    SFTConfig: SFT_ALIASES,
    GenerationConfig: GENERATION_ALIASES,
    EvaluationConfig: _REWARD,
}


def resolve_aliases(kind: type, tree: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Move every aliased key of the tree (in place) to our name.

    Returns our name -> the name typed, and the notices.
    """
    typed: dict[str, str] = {}
    notices: list[str] = []
    for old, new in ALIASES.get(kind, {}).items():
        found, value = _take(tree, old)
        if not found:
            continue
        if value is None and new not in schema_keys(kind):
            continue  # an empty section in a YAML file says nothing
        _merge(tree, new, value, old, new)
        for ours, theirs in _leaves(new, old, value):
            typed[ours] = theirs
        notices.append(f"'{old}' is read as '{new}'")
    return typed, notices


def our_name(kind: type, name: str) -> str:
    """What a key or section is called here."""
    for old, new in ALIASES.get(kind, {}).items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def _take(tree: dict[str, Any], name: str) -> tuple[bool, Any]:
    """Remove a key from the tree; sections left empty by it go as well."""
    first, _, rest = name.partition(".")
    if first not in tree:
        return False, None
    if not rest:
        return True, tree.pop(first)
    inner = tree[first]
    if not isinstance(inner, dict):
        return False, None
    found, value = _take(inner, rest)
    if found and not inner:
        del tree[first]
    return found, value


def _merge(tree: dict[str, Any], name: str, value: Any, old: str, new: str) -> None:
    """Put a value, or a section's values one by one, under a name that may already hold some."""
    first, _, rest = name.partition(".")
    if rest:
        inner = tree.setdefault(first, {})
        if inner is None:
            inner = tree[first] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"'{first}' (in '{new}') is a section, but it was given the value {inner!r}")
        _merge(inner, rest, value, old, new)
    elif isinstance(value, dict) and isinstance(tree.get(first), dict):
        for each, below in value.items():
            _merge(tree[first], each, below, f"{old}.{each}", f"{new}.{each}")
    elif tree.get(first) is not None and tree[first] != value:
        raise ConfigError(
            f"'{old}' is another name of '{new}', and both are given: {value!r} and {tree[first]!r}. Keep one of them"
        )
    else:
        tree[first] = value


def _leaves(new: str, old: str, value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping) or not value:
        return [(new, old)]
    return [
        pair for each, below in value.items() for pair in _leaves(f"{new}.{each}", f"{old}.{each}", below)
    ]
