"""`verl recipes [NAME]`: the recipes with their papers, or the README of one."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap

from verl.config.recipes import read_recipe, recipe_names

_WIDTH = 110


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
