"""From a command line or a dict to a checked, final config.

What always holds of a config returned here: every key is known and of its type, every key that follows another
has its final value, and the combination has passed `verl.config.checks`. Errors name every problem at once.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from verl.config.aliases import our_name, resolve_aliases
from verl.config.checks import check
from verl.config.convert import build
from verl.config.finalize import finalize
from verl.config.keys import get, nearest, schema_keys
from verl.config.schema import AnyConfig, EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.config.show import help_text, to_dict, to_yaml
from verl.config.sources import (
    from_mapping,
    overlay,
    parse_command_line,
    parse_overrides,
    plant,
    read_yaml,
    resolve,
    uproot,
)
from verl.errors import CommandAnswered, ConfigError

log = logging.getLogger(__name__)

Config = TypeVar("Config", PPOConfig, SFTConfig, GenerationConfig, EvaluationConfig)


def ppo_command(argv: list[str]) -> PPOConfig | None:
    """The config of `main_ppo`; None when --help, --cfg or --check was answered (on stdout) instead."""
    return _command(PPOConfig, argv, "python -m verl.trainer.main_ppo")


def sft_command(argv: list[str]) -> SFTConfig | None:
    """The config of `sft_trainer`; otherwise as `ppo_command`."""
    return _command(SFTConfig, argv, "python -m verl.trainer.sft_trainer")


def load_ppo_config(argv: list[str]) -> PPOConfig:
    """As `ppo_command`, but a command line that only asks a question ends the program."""
    config = ppo_command(argv)
    if config is None:
        raise CommandAnswered(0)
    return config


def load_sft_config(argv: list[str]) -> SFTConfig:
    """As `sft_command`, but a command line that only asks a question ends the program."""
    config = sft_command(argv)
    if config is None:
        raise CommandAnswered(0)
    return config


def load_generation_config(argv: list[str]) -> GenerationConfig:
    """The config of `main_generation`; a command line that only asks a question ends the program."""
    config = _command(GenerationConfig, argv, "python -m verl.trainer.main_generation")
    if config is None:
        raise CommandAnswered(0)
    return config


def load_evaluation_config(argv: list[str]) -> EvaluationConfig:
    """The config of `main_eval`; a command line that only asks a question ends the program."""
    config = _command(EvaluationConfig, argv, "python -m verl.trainer.main_eval")
    if config is None:
        raise CommandAnswered(0)
    return config


def from_dict(
    kind: type[Config], values: Mapping[str, Any], *, checked: bool = True, quiet: bool = False
) -> Config:
    """A config from nested or dotted names. checked=False: types and names only, e.g. without a model path;
    quiet: warnings are not logged."""
    draft = _Draft(kind)
    draft.add(from_mapping(values))
    return draft.finish(checked, quiet)


def _command(kind: type[Config], argv: list[str], command: str) -> Config | None:
    line = parse_command_line(argv)
    if line.help:
        sys.stdout.write(help_text(kind, command, line.help_about))
        return None
    draft = _Draft(kind)
    draft.add(read_yaml(line.config_path, line.config_name))
    for override in parse_overrides(line.overrides):
        if override.delete:
            draft.remove(override.name)
        else:
            draft.add(plant({}, override.name, override.value))
    if line.show_job:
        sys.stdout.write(to_yaml(draft.finish(checked=False)))
        return None
    config = draft.finish(checked=True, quiet=line.check)
    if line.check:
        sys.stdout.write(_plan(config) + "\n")
        return None
    return config


def _plan(config: AnyConfig) -> str:
    """What `--check` says."""
    if isinstance(config, (PPOConfig, SFTConfig)):
        from verl.config.plan import plan, render

        return render(plan(config))
    from verl.config.offline_plan import offline_plan

    return offline_plan(config)


class _Draft(Generic[Config]):
    """What the user gave so far, under our names. Sources come in order; a later one wins, however it is spelt."""

    def __init__(self, kind: type[Config]) -> None:
        self.kind: type[Config] = kind
        self.tree: dict[str, Any] = {}
        self.as_typed: dict[str, Any] = {}
        self.typed: dict[str, str] = {}
        self.noticed: set[str] = set()

    def add(self, tree: dict[str, Any]) -> None:
        overlay(self.as_typed, tree)
        typed, notices = resolve_aliases(self.kind, tree)
        self.typed.update(typed)
        for notice in notices:
            if notice not in self.noticed:
                self.noticed.add(notice)
                log.warning("%s", notice)
        overlay(self.tree, tree)

    def remove(self, name: str) -> None:
        ours = our_name(self.kind, name)
        keys = schema_keys(self.kind)
        if not any(key == ours or key.startswith(f"{ours}.") or ours.startswith(f"{key}.") for key in keys):
            raise ConfigError(
                f"'~{name}' removes an unknown key. Nearest known key: '{nearest(self.kind, ours)[0]}'"
            )
        uproot(self.tree, ours)

    def finish(self, checked: bool, quiet: bool = False) -> Config:
        """The config; warnings are logged unless `quiet` (the plan shows them)."""
        tree = resolve(self.tree, (to_dict(self.kind()), self.as_typed))
        problems: list[str] = []
        config: Config = build(self.kind, tree, problems, self.typed)
        if problems:
            raise ConfigError("\n".join(problems))
        config.user_set = frozenset(_given(self.kind, tree, ""))
        for notice in finalize(config):
            log.info("%s", notice)
        if checked:
            import_plugins(config)
            warnings = check(config)
            for warning in [] if quiet else warnings:
                log.warning("%s", warning)
        return config


def _given(kind: type, tree: Mapping[str, Any], prefix: str) -> list[str]:
    """The full names of the keys the tree gives."""
    found: list[str] = []
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if full in schema_keys(kind):
            found.append(full)
        elif isinstance(value, Mapping):
            found += _given(kind, value, f"{full}.")
    return found


_PLUGIN_KEYS = (
    "trainer.plugins",
    "actor_rollout_ref.model.external_lib",
    "critic.model.external_lib",
    "model.external_lib",
)


def import_plugins(config: AnyConfig) -> None:
    """Import the user's modules, so that what they register is known from now on."""
    for key in _PLUGIN_KEYS:
        if key not in schema_keys(type(config)):
            continue
        for module in get(config, key):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"cannot import the module '{module}' ({key}): {error}. "
                    "It must be importable from here, e.g. by PYTHONPATH"
                ) from error


__all__ = [
    "from_dict",
    "import_plugins",
    "load_evaluation_config",
    "load_generation_config",
    "load_ppo_config",
    "load_sft_config",
    "ppo_command",
    "sft_command",
    "to_dict",
    "to_yaml",
]
