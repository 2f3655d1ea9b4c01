"""From a command line or a dict to a checked, final config.

Every key of a config returned here is known, of its type and final, and the combination has passed
`verl.config.checks`. Errors name every problem at once.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from verl.config.aliases import our_name, resolve_aliases
from verl.config.checks import check
from verl.config.convert import Builder
from verl.config.finalize import finalize
from verl.config.keys import get, nearest, schema_keys
from verl.config.schema import AnyConfig, EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.config.show import help_text, to_dict, to_yaml
from verl.config.sources import (
    del_path,
    from_mapping,
    merge,
    parse_command_line,
    parse_overrides,
    read_yaml,
    resolve,
    set_path,
)
from verl.errors import CommandAnswered, ConfigError

log = logging.getLogger(__name__)

Config = TypeVar("Config", PPOConfig, SFTConfig, GenerationConfig, EvaluationConfig)
_PLUGIN_KEYS = (
    "trainer.plugins", "actor_rollout_ref.model.external_lib", "critic.model.external_lib", "model.external_lib",
)  # fmt: skip


def load_config(kind: type[Config], argv: list[str]) -> Config:
    """The config of a command line; --help, --cfg and --check are answered on stdout and end the program."""
    line = parse_command_line(argv)
    if line.help:
        sys.stdout.write(help_text(kind, line.help_about))
        raise CommandAnswered(0)
    draft = _Draft(kind)
    draft.add(read_yaml(line.config_path, line.config_name))
    for override in parse_overrides(line.overrides):
        if override.delete:
            draft.remove(override.name)
        else:
            draft.add(set_path({}, override.name, override.value))
    if line.show_job:
        sys.stdout.write(to_yaml(draft.finish(checked=False)))
        raise CommandAnswered(0)
    config: Config = draft.finish(checked=True, quiet=line.check)
    if line.check:
        from verl.config.plan import check_text

        sys.stdout.write(check_text(config) + "\n")
        raise CommandAnswered(0)
    return config


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


class _Draft(Generic[Config]):
    """The user's values so far, under our names. Sources come in order; a later one wins, whichever name it uses."""

    def __init__(self, kind: type[Config]) -> None:
        self.kind: type[Config] = kind
        self.tree: dict[str, Any] = {}
        self.as_typed: dict[str, Any] = {}
        self.typed: dict[str, str] = {}
        self.noticed: set[str] = set()

    def add(self, tree: dict[str, Any]) -> None:
        merge(self.as_typed, tree)
        typed, notices = resolve_aliases(self.kind, tree)
        self.typed.update(typed)
        for notice in notices:
            if notice not in self.noticed:
                self.noticed.add(notice)
                log.warning("%s", notice)
        merge(self.tree, tree)

    def remove(self, name: str) -> None:
        ours = our_name(self.kind, name)
        keys = schema_keys(self.kind)
        if not any(key == ours or key.startswith(f"{ours}.") or ours.startswith(f"{key}.") for key in keys):
            raise ConfigError(
                f"'~{name}' removes an unknown key. Nearest known key: '{nearest(self.kind, ours)[0]}'"
            )
        del_path(self.tree, ours)

    def finish(self, checked: bool, quiet: bool = False) -> Config:
        """The config; warnings are logged unless `quiet`."""
        tree = resolve(self.tree, (to_dict(self.kind()), self.as_typed))
        builder = Builder(self.kind, self.typed)
        config: Config = builder.section(self.kind, tree)
        if builder.problems:
            raise ConfigError("\n".join(builder.problems))
        config.user_set = frozenset(_set_keys(self.kind, tree, ""))
        for notice in finalize(config):
            log.info("%s", notice)
        if checked:
            import_plugins(config)
            warnings = check(config)
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


def import_plugins(config: AnyConfig) -> None:
    """Import the user's modules, so that what they register is known from now on."""
    for key in schema_keys(type(config)):
        for module in get(config, key) if key in _PLUGIN_KEYS else []:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"cannot import '{module}' ({key}): {error}. Is it on PYTHONPATH?"
                ) from error


__all__ = [
    "from_dict", "import_plugins", "load_config", "load_ppo_config", "load_sft_config", "to_dict", "to_yaml",
]  # fmt: skip
