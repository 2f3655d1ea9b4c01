"""Recipes: the keys of a published method under one name, `recipe=NAME`.

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

from verl.config.keys import schema_keys
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
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
