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
from contextlib import suppress
from typing import Any, Generic, TypeVar

from verl.config.aliases import (
    Unread,
    apply_async_names,
    apply_rollout_mode,
    apply_unread,
    has_key,
    our_name,
    resolve_aliases,
)
from verl.config.build import Builder, finalize, restore_sections
from verl.config.checks import check, known_names
from verl.config.keys import MASK, did_you_mean, get, mask_values, masked_keys, schema_keys, to_dict
from verl.config.methods import ADV_ESTIMATOR, POLICY_LOSS
from verl.config.plan import RunPlan
from verl.config.recipes import Recipe, help_text, recipe_for
from verl.config.schema import AnyConfig, OfflineConfig, PPOConfig, SFTConfig
from verl.config.sources import (
    dump_yaml,
    from_mapping,
    get_path,
    merge,
    parse_command_line,
    parse_overrides,
    read_yaml,
    resolve,
    set_path,
    take_path,
)
from verl.errors import CommandAnswered, ConfigError
from verl.user_code import import_path, is_file, without_scheme

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=AnyConfig)
_PLUGIN_KEYS = (
    "trainer.plugins", "actor_rollout_ref.model.external_lib", "critic.model.external_lib",
    "implicit_reward.model.external_lib", "model.external_lib",
)  # fmt: skip


_REGISTERED_BY_REWARDS = (ADV_ESTIMATOR, POLICY_LOSS, "reward.reward_manager.name")
# What --help reads of a command line.
_HELP_READS = re.compile(r"\+{0,2}(recipe|trainer\.plugins)=")
_VARIABLE = re.compile(r"\$\{oc\.env:([^,}]+)")
_FOLDER_KEYS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")


def load_config(kind: type[Config], argv: list[str], *, checked: bool = True) -> Config:
    """The config of a command line; --help, --cfg and --check are answered on stdout and end the program. checked=False
    as in `from_dict`."""
    line = parse_command_line(argv)
    draft = _Draft(kind)
    if line.help:
        with suppress(ConfigError):  # help is given also where the file is not right
            draft.add(read_yaml(line.config_path, line.config_name))
        for override in parse_overrides(word for word in line.overrides if _HELP_READS.match(word)):
            draft.add(set_path({}, override.name, override.value))
        import_plugins(draft.tree)
        about = [our_name(kind, name) for name in line.help_about]
        sys.stdout.write(help_text(kind, about, draft.recipe))
        raise CommandAnswered(0)
    draft.add(read_yaml(line.config_path, line.config_name))
    for override in parse_overrides(line.overrides):
        if override.delete:
            draft.remove(override.name)
        else:
            draft.add(set_path({}, override.name, override.value))
    if line.cfg:
        sys.stdout.write(to_yaml(draft.finish(checked=False)))
        raise CommandAnswered(0)
    config: Config = draft.finish(checked=checked or line.check, quiet=line.check)
    if line.check:
        from verl.config.plan_report import check_text

        sys.stdout.write(check_text(config, draft.plan) + "\n")
        raise CommandAnswered(0)
    return config


def load_ppo_config(argv: list[str]) -> PPOConfig:
    return load_config(PPOConfig, argv)


def load_sft_config(argv: list[str]) -> SFTConfig:
    return load_config(SFTConfig, argv)


def from_dict(
    kind: type[Config], *sources: Mapping[str, Any], checked: bool = True, quiet: bool = False
) -> Config:
    """A config from nested or dotted names; a later source wins. checked=False: types and names only, e.g. without a
    model path; quiet: warnings are not logged."""
    draft = _Draft(kind)
    for values in sources:
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
        self.unread: dict[str, Unread] = {}
        self.noticed: set[str] = set()
        self.plan: RunPlan | None = None

    def add(self, tree: dict[str, Any]) -> None:
        merge(self.as_typed, tree)
        found, name = take_path(tree, "recipe")
        if found:
            self.recipe = None if name is None else recipe_for(self.kind, name)
        if "recipes" in tree:
            raise ConfigError(f"unknown key 'recipes' (value {tree['recipes']!r}). Write recipe=NAME")
        names = resolve_aliases(self.kind, tree)
        self.typed.update(names.typed)
        self.unread.update(names.unread)
        self._notice(names.notices)
        for name in names.unset:
            take_path(self.tree, name)
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
        unread = [each for each in self.unread if each == ours or each.startswith(f"{ours}.")]
        if not (unread or has_key(self.kind, ours)):
            raise ConfigError(f"'~{name}' removes an unknown key.{did_you_mean(self.kind, ours)}")
        for each in unread:
            del self.unread[each]
        take_path(self.tree, ours)
        self.removed.append(ours)

    def finish(self, checked: bool, quiet: bool = False) -> Config:
        """The config; warnings are logged unless `quiet`."""
        tree: dict[str, Any] = to_dict(self.recipe.tree) if self.recipe else {}
        for name in self.removed:
            take_path(tree, name)
        of_recipe = {*_set_keys(self.kind, tree, "")} - {*_set_keys(self.kind, self.tree, "")}
        merge(tree, self.tree)
        context = (to_dict(self.kind()), self.as_typed)
        given, tree = tree, resolve(tree, context)
        notices, problems = apply_unread(self.unread, tree, context)
        self._notice(notices + apply_rollout_mode(self.kind, tree))
        if self.kind is PPOConfig:
            self._notice(apply_async_names(self.as_typed, tree))
        absent = []
        try:
            import_plugins(tree)
        except ConfigError as error:
            if checked:
                raise
            absent.append(str(error))  # the reason, where a key turns out to be unknown
        builder = Builder(self.kind, self.typed)
        config: Config = builder.config(tree)
        if problems or builder.problems:
            raise ConfigError("\n".join([*absent, *problems, *builder.problems]))
        config.user_set = frozenset(_set_keys(self.kind, tree, ""))
        config.recipe_set = frozenset(of_recipe)
        config.from_environment = _from_environment(config, given, self.as_typed)
        for notice in finalize(config):
            log.info("%s", notice)
        if checked:
            masked = [
                f"'{key}' has '{MASK}' in place of a password or key, which is not written to config.yaml: give it "
                f"again, for example {key}='${{oc.env:NAME}}' with the environment variable NAME"
                for key in masked_keys(to_dict(config))
            ]
            if masked:
                raise ConfigError("\n".join(masked))
            self.plan = RunPlan(config) if isinstance(config, PPOConfig | OfflineConfig) else None
            warnings = check(config, self.plan)
            for warning in [] if quiet else warnings:
                log.warning("%s", warning)
        return config


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
        text, value = get_path(given, key), to_dict(get(config, key))
        derived = "${" in str(text) and any(secret in str(value) for secret in secrets)
        plain = value is None or isinstance(value, int | float)
        if (derived or _VARIABLE.search(str(text))) and not plain and key not in _FOLDER_KEYS:
            found[key] = text
    return found


def import_plugins(values: Mapping[str, Any]) -> None:
    """Import the user's modules and files that a config names, so that what they register is known from now on."""
    for key in _PLUGIN_KEYS:
        named = get_path(values, key)
        for module in [named] if isinstance(named, str) else named if isinstance(named, list) else []:
            if is_file(str(module)):
                import_path(module, None, key, ConfigError, "registrations")
                continue
            try:
                if not all(part.isidentifier() for part in str(module).split(".")):
                    raise ImportError("it is neither a file nor the name of a module")
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"cannot import '{module}' ({key}): {error}. Is it on PYTHONPATH?"
                ) from error
    _import_registering_reward(values)


def _import_registering_reward(values: Mapping[str, Any]) -> None:
    """Import the file of the reward function in this process too, where a config names an estimator, a loss or a
    reward manager that nothing else registered: that file may. Other reward files are imported by workers only."""
    path = get_path(values, "reward.custom_reward_function.path")
    keys = schema_keys(PPOConfig)
    named = [(keys[name], get_path(values, name)) for name in _REGISTERED_BY_REWARDS]
    if path and any(value is not None and value not in known_names(key) for key, value in named):
        file, _, name = without_scheme(str(path)).rpartition(":")
        import_path(file or name, None, "reward.custom_reward_function.path", ConfigError)


def import_plugins_of(config: AnyConfig) -> None:
    """The same in a process that was sent a config; its sections of plug-ins get their types."""
    import_plugins(to_dict(config))
    restore_sections(config)
