"""From plain values to a typed, final config.

`Builder` converts: a value either has one plain reading in the wanted type, or it is a problem whose text names the
key, the value and the type; all problems are collected before one error is raised. `finalize` then fills in what the
user left open: keys that follow others, defaults that depend on the batch, home folders.
"""

from __future__ import annotations

import copyreg
import math
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from verl.config.keys import (
    added_sections,
    declared,
    declared_at,
    did_you_mean,
    get,
    is_dtype,
    put,
    schema_keys,
    sections,
    to_dict,
    trl_names,
)
from verl.config.methods import needed_columns, plugin_sections
from verl.config.schema import (
    AnyConfig,
    GenerationConfig,
    ModelConfig,
    OfflineConfig,
    PolicyLossConfig,
    PPOConfig,
)
from verl.config.sections.algorithm import REINFORCE_LOSS

DTYPE_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "float8": "fp8",
}  # fmt: skip

# What `attn_implementation` of transformers and verl is called here.
ATTENTION_NAMES = {
    "flash_attention_2": "varlen", "flash_attention_3": "fa4", "flash_attention_4": "fa4", "eager": "sdpa",
    "flex_attention": "flex",
}  # fmt: skip

# Where to look instead, by the parts of the names with which other versions ask for it.
_RELATED_KEYS = {
    "agents are set up in actor_rollout_ref.rollout.multi_turn": ("agent_loop", "interaction_config_path"),
    "generating ahead of training is set by trainer.async_training.mode": ("async", "async_mode"),
}  # fmt: skip
# What another role's model takes from the actor's while its path is not given: it is then the same model.
_MODEL_FOLLOWS = (
    "path", "tokenizer_path", "dtype", "enable_gradient_checkpointing", "enable_activation_offload",
    "use_remove_padding", "share_prefixes", "attention_backend", "trust_remote_code", "override_config",
)  # fmt: skip


class Mismatch(Exception):
    """The value cannot be read as the wanted type."""


@dataclass
class Builder:
    """Fills the dataclass `root` from a nested mapping; `typed` maps our names to those the user typed."""

    root: Any
    typed: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def config(self, tree: Mapping[str, Any]) -> Any:
        """The whole config, with the sections of plug-ins."""
        config = self.section(self.root, tree)
        for name, kind in added_sections(self.root).items():
            parent, _, last = name.rpartition(".")
            vars(get(config, parent)).setdefault(last, self.section(kind, {}, f"{name}."))
            # Another process can read a section without the plug-in's module.
            copyreg.pickle(kind, lambda section, name=name: (restored_section, (name, to_dict(section))))  # type: ignore[misc]
        return config

    def section(self, kind: Any, tree: Mapping[str, Any], prefix: str = "", defaults: Any = None) -> Any:
        values, known = dict(defaults or {}), declared_at(self.root, kind, prefix)
        for name, value in tree.items():
            full = f"{prefix}{name}"
            if name not in known:
                self.problems += self._unknown(full, value, ", ".join(known))
                continue
            wanted, _, metadata = known[name]
            if is_dataclass(wanted) and value is None:
                continue
            try:
                if is_dataclass(wanted) and isinstance(value, Mapping):
                    values[name] = self.section(wanted, value, f"{full}.", metadata["defaults"])
                    continue
                values[name] = self.convert(wanted, value, full)
                if is_dtype(metadata):
                    values[name] = DTYPE_NAMES.get(values[name], values[name])
                elif name == "attention_backend":
                    values[name] = ATTENTION_NAMES.get(values[name], values[name])
            except Mismatch:
                self.problems.append(f"'{self._as_typed(full)}' is {value!r}; it must be {type_name(wanted)}")
        added = {name: values.pop(name) for name in values.keys() - declared(kind).keys()}
        section = kind(**values)
        vars(section).update(added)
        return section

    def convert(self, wanted: Any, value: Any, name: str) -> Any:
        """The value in the wanted type, or Mismatch."""
        origin = get_origin(wanted)
        if origin in (Union, types.UnionType):
            options = get_args(wanted)
            if type(None) in options and (value is None or value == "None"):
                return None
            if isinstance(value, str) and "_" in value and str in options:
                return value  # Python would read the bounds 0.5_2 as the number 0.52
            for option in (each for each in options if each is not type(None)):
                with suppress(Mismatch):
                    return self.convert(option, value, name)
            raise Mismatch
        if origin is list:
            (item,) = get_args(wanted)
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            return [self.convert(item, each, f"{name}[{i}]") for i, each in enumerate(items)]
        if origin is not dict and not is_dataclass(wanted):
            return _scalar(wanted, value)
        if not isinstance(value, Mapping):
            raise Mismatch
        return dict(value) if origin is dict else self.section(wanted, value, f"{name}.")

    def _unknown(self, name: str, value: Any, known: str) -> list[str]:
        if "[" in name:
            section = name.partition("[")[0]
            return [f"unknown key '{name}' (value {value!r}). Known keys of an item of '{section}': {known}"]
        if isinstance(value, Mapping) and value:
            return [
                line for each, below in value.items() for line in self._unknown(f"{name}.{each}", below, "")
            ]
        shown = self._as_typed(name)
        line = f"unknown key '{shown}'{f' (that is {name!r})' if shown != name else ''} (value {value!r})"
        for advice, names in _RELATED_KEYS.items():
            if set(names) & set(name.lower().split(".")):
                return [f"{line}: {advice}"]
        note = trl_names()["notes"].get(name) if "." not in shown else None
        if note is not None:
            return [f"{line}. TRL has it; here: {note}"]
        return [f"{line}.{did_you_mean(self.root, name)}"]

    def _as_typed(self, name: str) -> str:
        """What the user wrote for this key, where an alias was used."""
        for ours, theirs in self.typed.items():
            if name == ours or name.startswith(ours + "."):
                return theirs + name[len(ours) :]
        return name


def restored_section(name: str, values: Mapping[str, Any]) -> Any:
    """The section of a plug-in from its values; only the values, while the plug-in is not imported."""
    kind = plugin_sections().get(name)
    return types.SimpleNamespace(**values) if kind is None else Builder(kind).section(kind, values)


def restore_sections(config: AnyConfig) -> None:
    """Give the sections of plug-ins, which are imported now, their own types: in a process that was sent the config."""
    for name in added_sections(type(config)):
        if isinstance(get(config, name), types.SimpleNamespace):
            put(config, name, restored_section(name, vars(get(config, name))))


def _scalar(wanted: Any, value: Any) -> Any:
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif wanted is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        number = finite_number(value)
        if number is not None and number == int(number):
            return int(number)
    elif wanted is float and not isinstance(value, bool):
        number = finite_number(value)
        if number is not None:
            return number
    elif wanted is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    raise Mismatch


def finite_number(value: Any) -> float | None:
    """The value as a finite number."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def type_name(wanted: Any) -> str:
    """A type in words."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else type_name(each) for each in get_args(wanted))
    if origin is list:
        return f"a list, each item {type_name(get_args(wanted)[0])}"
    if origin is dict:
        return "a mapping of names to values"
    if is_dataclass(wanted):
        return f"a mapping with the keys {', '.join(each.name for each in fields(wanted))}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[wanted]


def finalize(config: AnyConfig) -> list[str]:
    """Fill in, in place, what the user left open; returns notices for the user."""
    _expand_home(config)
    notices = _mini_batch(config) if isinstance(config, PPOConfig) else []
    _follow(config)
    if isinstance(config, PPOConfig):
        _ppo(config)
    if isinstance(config, (PPOConfig, OfflineConfig)):
        trainer = config.trainer
        if not trainer.default_local_dir:
            trainer.default_local_dir = f"checkpoints/{trainer.project_name}/{trainer.experiment_name}"
        if trainer.resume_from_path and "trainer.resume_mode" not in config.user_set:
            trainer.resume_mode = "resume_path"
    if isinstance(config, OfflineConfig):
        _best_checkpoint(config)
    if isinstance(config, (PPOConfig, GenerationConfig)):
        rollout = config.rollout if isinstance(config, GenerationConfig) else config.actor_rollout_ref.rollout
        if rollout.max_model_len is None:
            rollout.max_model_len = config.data.max_prompt_length + config.data.max_response_length
    return notices


def fit_batch(config: PPOConfig | OfflineConfig, rows: int) -> list[str]:
    """Lower a batch size the user did not choose to what the data gives, with what follows from it; returns notices."""
    name, default = "data.train_batch_size", config.data.train_batch_size
    if name in config.user_set or not 0 < rows < default:
        return []
    size = rows
    if isinstance(config, PPOConfig):
        actor, mini_name = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.ppo_mini_batch_size"
        mini = actor.ppo_mini_batch_size
        if rows >= mini:
            size = rows // mini * mini
        elif mini_name in config.recipe_set:
            actor.ppo_mini_batch_size = rows  # the recipe takes one step per batch
        elif mini_name in config.user_set:
            return []
    config.data.train_batch_size = size
    notices = [f"{name}={size} (there are {rows} usable rows, fewer than the default of {default})"]
    if isinstance(config, PPOConfig):
        notices += _mini_batch(config)
        _follow(config)
    return notices


def _best_checkpoint(config: OfflineConfig) -> None:
    """What is the best, and how many are kept beside it."""
    trainer, patience = config.trainer, config.trainer.early_stop_patience
    # A checkpoint that is not validated cannot be the best.
    validated = trainer.test_freq >= 0 and (
        trainer.save_freq in (-1, trainer.test_freq)
        or (trainer.save_freq > 0 < trainer.test_freq and trainer.save_freq % trainer.test_freq == 0)
    )
    if "trainer.keep_best" not in config.user_set and config.data.val_files and (patience or validated):
        trainer.keep_best = "val/loss"
    if "trainer.keep_best_mode" not in config.user_set and trainer.keep_best:
        trainer.keep_best_mode = "min" if trainer.keep_best.endswith(("loss", "perplexity")) else "max"
    if patience and trainer.save_freq < 1 and "trainer.max_actor_ckpt_to_keep" not in config.user_set:
        trainer.max_actor_ckpt_to_keep = 1


def _expand_home(section: Any) -> None:
    """A leading ~ in paths is the user's home folder."""
    paths = {each.name for each in fields(section) if each.metadata.get("path")}
    for name, value in vars(section).items():
        for inner in value if isinstance(value, list) else [value]:
            if is_dataclass(inner):
                _expand_home(inner)
        if name in paths and value:
            found = [
                str(Path(path).expanduser()) if path.startswith("~") else path
                for path in (value if isinstance(value, list) else [value])
            ]
            setattr(section, name, found if isinstance(value, list) else found[0])


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
    actor.ppo_mini_batch_size = next(size for size in range(default, 0, -1) if prompts % size == 0)
    return [
        f"{name}={actor.ppo_mini_batch_size} (the default {default} does not fit data.train_batch_size={prompts})"
    ]


def _ppo(config: PPOConfig) -> None:
    policy, critic = config.actor_rollout_ref, config.critic
    for section, (kind, _) in sections(type(config)).items():
        model = get(config, section)
        for name in _MODEL_FOLLOWS if kind is ModelConfig and not model.path else ():
            if f"{section}.{name}" not in config.user_set:
                setattr(model, name, getattr(policy.model, name))
    if critic.enable is None:
        critic.enable = "values" in needed_columns(config)
    loss = policy.actor.policy_loss
    if config.algorithm.rollout_correction.reinforces and loss.loss_mode == PolicyLossConfig().loss_mode:
        loss.loss_mode = REINFORCE_LOSS
    # `do_sample` and `temperature` say the same thing; whichever the user gave decides.
    val, prefix = policy.rollout.val_kwargs, "actor_rollout_ref.rollout.val_kwargs."
    if prefix + "do_sample" not in config.user_set:
        val.do_sample = val.temperature > 0
    elif prefix + "temperature" not in config.user_set:
        val.temperature = 1.0 if val.do_sample else 0.0
    ahead = config.trainer.async_training
    if ahead.mode != "off" and ahead.staleness is None:
        ahead.staleness = 1
