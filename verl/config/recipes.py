"""Recipes: the keys of a published method under one name, `recipe=NAME`; and the text of --help: what a command does,
its options, its first keys and its sections, or the keys of a section with their defaults and documentation.

A recipe is a folder `verl/recipes/NAME` with `recipe.yaml`, the keys it sets, and `README.md`, whose first lines are a
title, one sentence, and `Paper: ...`. Its keys are defaults: whatever the user sets, anywhere, wins. `verl recipes
[NAME]` lists them with their papers, or prints the README of one.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.keys import Key, did_you_mean, schema_keys, sections
from verl.config.schema import (
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    PPOConfig,
    RewardTrainingConfig,
    SFTConfig,
)
from verl.config.sources import from_mapping, leaves, load_yaml
from verl.errors import ConfigError

_WIDTH = 110
FOLDER = Path(__file__).parents[1] / "recipes"
COMMANDS: dict[Any, str] = {
    PPOConfig: "verl train",
    SFTConfig: "verl sft",
    DPOConfig: "verl dpo",
    RewardTrainingConfig: "verl reward train",
}


@dataclass(frozen=True)
class Recipe:
    """A recipe as it is in its folder."""

    name: str
    tree: dict[str, Any]
    readme: str

    @property
    def keys(self) -> dict[str, Any]:
        """The full names of the keys it sets, and their values."""
        return {".".join(path): value for path, value in leaves(self.tree)}

    @property
    def about(self) -> str:
        return self._line(1)

    @property
    def paper(self) -> str:
        return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", self._line(2).removeprefix("Paper: "))

    def _line(self, number: int) -> str:
        return [line for line in self.readme.splitlines() if line][number]


def recipe_names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/recipe.yaml"))


def read_recipe(name: Any) -> Recipe:
    """The recipe of this name; ConfigError, with those that exist, where there is none."""
    names = recipe_names()
    if name not in names:
        wanted = str(name).lower().replace("-", "_").replace("++", "_plus_plus").replace("+", "_plus")
        close = difflib.get_close_matches(wanted, names, 1, cutoff=0.5)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"'recipe' is {name!r}, which is not known.{meant} Recipes: {', '.join(names)}; `verl recipes` says more"
        )
    folder = FOLDER / name
    path = folder / "recipe.yaml"
    return Recipe(
        name, from_mapping(load_yaml(path), str(path)), (folder / "README.md").read_text(encoding="utf-8")
    )


def recipe_for(kind: Any, name: Any) -> Recipe:
    """The recipe of this name; ConfigError where it sets keys that a config of this kind does not have."""
    recipe = read_recipe(name)
    unknown = [key for key in recipe.keys if key not in schema_keys(kind)]
    if not unknown:
        return recipe
    commands = [
        command
        for other, command in COMMANDS.items()
        if all(key in schema_keys(other) for key in recipe.keys)
    ]
    raise ConfigError(
        f"recipe '{name}' is for `{' and '.join(commands)}`: it sets '{unknown[0]}', a key this command does not have"
        if commands
        else f"recipe '{name}' sets '{unknown[0]}', which no command has"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this one's README: paper, keys, command")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(read_recipe(args.name).readme if args.name else listing())
    return 0


def listing() -> str:
    """Name, paper and one sentence of every recipe."""
    lines = []
    for recipe in map(read_recipe, recipe_names()):
        number = re.search(r"arXiv:\d+\.\d+", recipe.paper)
        left = f"{recipe.name:<24}{number.group() if number else '':<18}"
        indent = " " * len(left)
        lines += textwrap.wrap(recipe.about, _WIDTH, initial_indent=left, subsequent_indent=indent)
    return "\n".join(
        [*lines, "", "verl recipes NAME says more; verl train recipe=NAME key=value ... starts from one.", ""]
    )


def help_text(kind: type, about: list[str], recipe: Recipe | None = None) -> str:
    """What the command does, its options, and the keys of the named sections or keys, of all with `all`; where none is
    named, the keys one sets first and the sections. With a recipe, the keys it sets stand first."""
    keys = schema_keys(kind)
    chosen = list(keys.values())
    if about and about != ["all"]:
        chosen = [
            key
            for key in chosen
            if any(key.name == name or key.name.startswith(f"{name}.") for name in about)
        ]
        for name in about:
            if name not in keys and name not in sections(kind):
                raise ConfigError(f"no key or section '{name}'.{did_you_mean(kind, name)}")
    lines = _head(kind)
    if recipe is not None:
        lines += [f"recipe={recipe.name}: {recipe.about}", f"{recipe.paper}. It sets, below your own keys:"]
        for name, value in recipe.keys.items():
            lines.append(f"  {name}={str(value).lower() if isinstance(value, bool) else value}")
        lines.append("")
    if about:
        return "\n".join([*lines, "Keys (default, meaning):", *_key_lines(kind, chosen)]) + "\n"
    lines += ["The keys one sets first (default, meaning):"]
    lines += _key_lines(kind, [key for key in chosen if key.name in _FIRST_KEYS])
    lines += ["", f"Sections ({_command(kind)} --help SECTION lists their keys, --help all every one):"]
    for name, (_, doc) in sections(kind).items():
        count = sum(key.startswith(f"{name}.") for key in keys)
        if name and count and name.removeprefix("actor_rollout_ref.").count(".") == 0:
            number = f"{count} key{'s' if count > 1 else ''}"
            lines.append(f"  {name:<33} {number:<14} {doc}")
    return "\n".join(lines) + "\n"


_FIRST_KEYS = (
    "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature", "algorithm.adv_estimator", "algorithm.loss", "algorithm.beta",
    "reward.custom_reward_function.path", "custom_reward_function.path", "model.path", "model.lora_rank", "optim.lr",
    "data.train_files", "data.val_files", "data.train_batch_size", "data.max_prompt_length",
    "data.max_response_length", "data.max_length", "data.path", "data.output_path", "rollout.name",
    "rollout.n", "rollout.temperature", "trainer.total_epochs", "trainer.total_training_steps",
    "trainer.n_gpus_per_node", "trainer.save_freq", "trainer.test_freq", "trainer.logger", "trainer.project_name",
    "trainer.experiment_name", "trainer.default_local_dir",
)  # fmt: skip


_ABOUT: dict[type, tuple[str, str, str]] = {
    PPOConfig: (
        "main_ppo",
        "Trains a language model by reinforcement learning.",
        "model.path=MODEL data.train_files=train.parquet algorithm.adv_estimator=grpo rollout.n=8",
    ),
    SFTConfig: (
        "sft_trainer",
        "Fine-tunes a language model on prompt and response pairs or conversations.",
        "model.path=MODEL data.train_files=train.parquet",
    ),
    DPOConfig: (
        "dpo_trainer",
        "Trains a language model on pairs of a chosen and a rejected answer.",
        "model.path=MODEL data.train_files=pairs.parquet",
    ),
    RewardTrainingConfig: (
        "reward_trainer",
        "Trains a reward model on pairs of a chosen and a rejected answer.",
        "model.path=MODEL data.train_files=pairs.parquet",
    ),
    GenerationConfig: (
        "main_generation",
        "Samples responses for a file of prompts; after an interruption the same command resumes.",
        "model.path=MODEL data.path=test.parquet data.output_path=responses.parquet rollout.n=4",
    ),
    EvaluationConfig: (
        "main_eval",
        "Scores a file of responses, by your reward function or by the scorer of each data_source.",
        "data.path=responses.parquet custom_reward_function.path=my_reward.py",
    ),
}  # the module, what it does, and the keys of an example


def _command(kind: type) -> str:
    return {**COMMANDS, GenerationConfig: "verl generate", EvaluationConfig: "verl eval"}[kind]


def _head(kind: type) -> list[str]:
    module, does, keys = _ABOUT[kind]
    command = _command(kind)
    example = textwrap.wrap(f"{command} {keys}", _WIDTH - 4, break_on_hyphens=False, break_long_words=False)
    return [
        f"{command} [options] key=value ...",
        "",
        does,
        f"The same program: python -m verl.trainer.{module}",
        "",
        "Example:",
        "  " + " \\\n    ".join(example),
        "",
        "Options:",
        "  --config-path DIR --config-name FILE  take keys from your own YAML file; key=value on the command line wins",
        "  recipe=NAME                           start from a published method's keys; `verl recipes` lists them",
        "  --cfg job                             print the resolved config and exit",
        "  --check                               check everything, print the plan (batches, memory) and exit",
        "  --help [SECTION ... | all]            this text, the keys of the named sections, or all keys",
        "",
    ]


def _key_lines(kind: type, chosen: list[Key]) -> list[str]:
    docs = {name: doc for name, (_, doc) in sections(kind).items()}
    lines: list[str] = []
    last_section: str | None = None
    for key in chosen:
        if key.section != last_section:
            last_section = key.section
            lines += ["", f"{key.section}: {docs.get(key.section, '')}"]
        doc = key.doc
        if key.metadata["known"]:
            doc += f" [{', '.join(key.metadata['known'])}]"
        left = f"  {key.last:<33} {_default(key):<14} "
        wrapped = textwrap.wrap(doc, _WIDTH - 51) or [""]
        lines += [left + wrapped[0], *(" " * 51 + line for line in wrapped[1:])]
    return lines


def _default(key: Key) -> str:
    if key.required:
        return "(required)"
    if key.metadata["follows"]:
        return "(follows)"
    if key.default is None or key.default == "":
        return "-"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    if isinstance(key.default, list):
        return f"[{', '.join(str(each) for each in key.default)}]"
    return f"{key.default:g}" if isinstance(key.default, float) else str(key.default).replace("\n", "\\n")
