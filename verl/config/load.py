"""From a command line or a dict to a checked, final config.

Every key of a config returned here is known, of its type and final, and the combination has passed
`verl.config.checks`. Errors name every problem at once. Other spellings of keys are moved to ours and reported once; a
key in both spellings with different values is an error.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Generic, TypeVar

from verl.config.async_aliases import AsyncAliases, converted
from verl.config.build import Builder, finalize
from verl.config.checks import check
from verl.config.keys import get, nearest, schema_keys, to_dict
from verl.config.masking import MASK, mask_values, masked_keys
from verl.config.recipes import Recipe, recipe_for
from verl.config.schema import (
    AnyConfig,
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RewardTrainingConfig,
    SFTConfig,
)
from verl.config.sources import (
    del_path,
    dump_yaml,
    from_mapping,
    merge,
    parse_command_line,
    parse_overrides,
    read_yaml,
    resolve,
    set_path,
    take_path,
)
from verl.errors import CommandAnswered, ConfigError
from verl.user_code import import_path, is_file

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=AnyConfig)
_PLUGIN_KEYS = (
    "trainer.plugins", "actor_rollout_ref.model.external_lib", "critic.model.external_lib",
    "implicit_reward.model.external_lib", "model.external_lib",
)  # fmt: skip


_VARIABLE = re.compile(r"\$\{oc\.env:([^,}]+)")
_FOLDER_KEYS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
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

RAW_PROMPTS = "data.raw_prompts"
_PROMPT_ALIASES = {RAW_PROMPTS: "data.apply_chat_template"}

# Old name to ours, longer ones before the sections that contain them.
_PPO_ALIASES: dict[str, str] = {
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

_ALIASES: dict[type, dict[str, str]] = {
    PPOConfig: _PPO_ALIASES,
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


def load_config(kind: type[Config], argv: list[str]) -> Config:
    """The config of a command line; --help, --cfg and --check are answered on stdout and end the program."""
    line = parse_command_line(argv)
    if line.help:
        from verl.config.help import help_text

        recipe = _recipe_on(kind, line.overrides)
        sys.stdout.write(help_text(kind, line.help_about, recipe))
        raise CommandAnswered(0)
    draft = _Draft(kind)
    draft.add(read_yaml(line.config_path, line.config_name))
    for override in parse_overrides(line.overrides):
        if override.delete:
            draft.remove(override.name)
        else:
            draft.add(set_path({}, override.name, override.value))
    if line.cfg:
        sys.stdout.write(to_yaml(draft.finish(checked=False)))
        raise CommandAnswered(0)
    config: Config = draft.finish(checked=True, quiet=line.check)
    if line.check:
        from verl.config.plan import check_text

        sys.stdout.write(check_text(config) + "\n")
        raise CommandAnswered(0)
    return config


def _recipe_on(kind: type, overrides: list[str]) -> Recipe | None:
    """The recipe a command line names."""
    found = parse_overrides(word for word in overrides if word.lstrip("+").startswith("recipe="))
    return recipe_for(kind, found[-1].value) if found and found[-1].value is not None else None


def load_ppo_config(argv: list[str]) -> PPOConfig:
    return load_config(PPOConfig, argv)


def load_sft_config(argv: list[str]) -> SFTConfig:
    return load_config(SFTConfig, argv)


def from_dict(
    kind: type[Config], values: Mapping[str, Any], *, checked: bool = True, quiet: bool = False
) -> Config:
    """A config from nested or dotted names. checked=False: types and names only, e.g. without a model path;
    quiet: warnings are not logged."""
    draft = _Draft(kind)
    draft.add(from_mapping(values))
    return draft.finish(checked, quiet)


def recorded(config: AnyConfig) -> dict[str, Any]:
    """The resolved config as it is shown, written and sent to trackers: what came from environment variables stands by
    their names, and passwords and keys are masked."""
    values: dict[str, Any] = to_dict(config)
    for name, text in config.from_environment.items():
        set_path(values, name, text)
    masked: dict[str, Any] = mask_values(values)
    return masked


def to_yaml(config: AnyConfig) -> str:
    """The resolved config, as `recorded`, as YAML that loads again with --config-path and --config-name."""
    return dump_yaml(recorded(config))


class _Draft(Generic[Config]):
    """The user's values so far, under our names. Sources come in order; a later one wins, whichever name it uses.
    The keys of a recipe stand below all of them."""

    def __init__(self, kind: type[Config]) -> None:
        self.kind: type[Config] = kind
        self.tree: dict[str, Any] = {}
        self.recipe: Recipe | None = None
        self.removed: list[str] = []
        self.as_typed: dict[str, Any] = {}
        self.typed: dict[str, str] = {}
        self.noticed: set[str] = set()
        self.ahead = AsyncAliases()

    def add(self, tree: dict[str, Any]) -> None:
        merge(self.as_typed, tree)
        found, name = take_path(tree, "recipe")
        if found:
            self.recipe = None if name is None else recipe_for(self.kind, name)
        if "recipes" in tree:
            raise ConfigError(f"unknown key 'recipes' (value {tree['recipes']!r}). Write recipe=NAME")
        if "async_training" in _ALIASES[self.kind]:
            self._notice(self.ahead.take(tree))
        typed, notices = _resolve_aliases(self.kind, tree)
        self.typed.update(typed)
        self._notice(notices)
        merge(self.tree, tree)

    def _notice(self, notices: list[str]) -> None:
        for notice in notices:
            if notice not in self.noticed:
                self.noticed.add(notice)
                log.warning("%s", notice)

    def remove(self, name: str) -> None:
        if name == "recipe":
            self.recipe = None
            return
        ours = our_name(self.kind, name)
        keys = schema_keys(self.kind)
        if not any(key == ours or key.startswith(f"{ours}.") or ours.startswith(f"{key}.") for key in keys):
            raise ConfigError(
                f"'~{name}' removes an unknown key. Nearest known key: '{nearest(self.kind, ours)[0]}'"
            )
        del_path(self.tree, ours)
        self.removed.append(ours)

    def _recipe_tree(self) -> dict[str, Any]:
        """The recipe's values, less those the user removed."""
        tree: dict[str, Any] = {}
        merge(tree, self.recipe.tree if self.recipe else {})
        for name in self.removed:
            del_path(tree, name)
        return tree

    def finish(self, checked: bool, quiet: bool = False) -> Config:
        """The config; warnings are logged unless `quiet`."""
        tree: dict[str, Any] = self._recipe_tree()
        of_recipe = {*_set_keys(self.kind, tree, "")} - {*_set_keys(self.kind, self.tree, "")}
        merge(tree, self.tree)
        given, tree = tree, resolve(tree, (to_dict(self.kind()), self.as_typed))
        self._notice(self.ahead.finish(tree))
        builder = Builder(self.kind, self.typed)
        config: Config = builder.section(self.kind, tree)
        if builder.problems:
            raise ConfigError("\n".join(builder.problems))
        config.user_set = frozenset(_set_keys(self.kind, tree, ""))
        config.recipe_set = frozenset(of_recipe)
        config.from_environment = _from_environment(config, given, self.as_typed)
        if checked:
            _refuse_masked(config)
            import_plugins(config)
        for notice in finalize(config):
            log.info("%s", notice)
        if checked:
            warnings = check(config)
            for warning in [] if quiet else warnings:
                log.warning("%s", warning)
        return config


def _resolve_aliases(kind: type, tree: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Move every aliased key of the tree (in place) to our name.

    Returns our name -> the name typed, and the notices.
    """
    typed: dict[str, str] = {}
    notices: list[str] = []
    for old, new in _ALIASES.get(kind, {}).items():
        found, value = take_path(tree, old)
        if not found:
            continue
        if value is None and new not in schema_keys(kind):
            continue  # an empty section in a YAML file says nothing
        theirs, value = value, _from_raw_prompts(value) if old == RAW_PROMPTS else converted(old, value)
        _move(tree, new, value, old, new)
        for ours, name in _leaves(new, old, value):
            typed[ours] = name
        changed = theirs != value
        notices.append(
            f"'{old}{f'={theirs}' if changed else ''}' is read as '{new}{f'={value}' if changed else ''}'"
        )
    return typed, notices


def _from_raw_prompts(value: Any) -> str:
    if str(value).lower() not in ("true", "false"):
        raise ConfigError(f"'{RAW_PROMPTS}' is {value!r}; it must be true or false")
    return "never" if str(value).lower() == "true" else "auto"


def our_name(kind: type, name: str) -> str:
    """What a key or section is called here."""
    for old, new in _ALIASES.get(kind, {}).items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def other_names(kind: type) -> dict[str, str]:
    """Other spellings of keys and sections that a command takes, each with ours."""
    return dict(_ALIASES.get(kind, {}))


def _move(tree: dict[str, Any], name: str, value: Any, old: str, new: str) -> None:
    """Put a value, or a section's values one by one, under a name that may already hold some."""
    first, _, rest = name.partition(".")
    if rest:
        inner = tree.setdefault(first, {})
        if inner is None:
            inner = tree[first] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"'{first}' (in '{new}') is a section, but it was given the value {inner!r}")
        _move(inner, rest, value, old, new)
    elif isinstance(value, dict) and isinstance(tree.get(first), dict):
        for each, below in value.items():
            _move(tree[first], each, below, f"{old}.{each}", f"{new}.{each}")
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


def _set_keys(kind: type, tree: Mapping[str, Any], prefix: str) -> list[str]:
    """The full names of the keys the tree sets."""
    found: list[str] = []
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if full in schema_keys(kind):
            found.append(full)
        elif isinstance(value, Mapping):
            found += _set_keys(kind, value, f"{full}.")
    return found


def _from_environment(
    config: AnyConfig, given: Mapping[str, Any], as_typed: Mapping[str, Any]
) -> dict[str, Any]:
    """Texts that hold the value of an environment variable, also by way of another key, as they were given. Not
    numbers, and not the folders of the run, which must be found again."""
    names = {name.strip() for name in _VARIABLE.findall(f"{given}{as_typed}")}
    secrets = [os.environ[name] for name in names if os.environ.get(name)]
    found: dict[str, Any] = {}
    for key in _set_keys(type(config), given, "") if names else []:
        text, value = take_path(deepcopy(dict(given)), key)[1], to_dict(get(config, key))
        derived = "${" in str(text) and any(secret in str(value) for secret in secrets)
        plain = value is None or isinstance(value, int | float)
        if (derived or _VARIABLE.search(str(text))) and not plain and key not in _FOLDER_KEYS:
            found[key] = text
    return found


def _refuse_masked(config: AnyConfig) -> None:
    lines = [
        f"'{key}' has '{MASK}' in place of a password or key, which is not written to config.yaml: give it again, for "
        f"example {key}='${{oc.env:NAME}}' with the environment variable NAME"
        for key in masked_keys(to_dict(config))
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def import_plugins(config: AnyConfig) -> None:
    """Import the user's modules, so that what they register is known from now on."""
    for key in schema_keys(type(config)):
        for module in get(config, key) if key in _PLUGIN_KEYS else []:
            if is_file(module):
                import_path(module, None, key, ConfigError, "registrations")
                continue
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"cannot import '{module}' ({key}): {error}. Is it on PYTHONPATH?"
                ) from error
