"""What the pages show can be typed: Python compiles, commands exist and take the keys and options they are given."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generators.config_reference import COMMANDS
from verl.cli import PROGRAMS
from verl.completion import SCRIPTS
from verl.config.aliases import our_name
from verl.config.keys import schema_keys

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "verl").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"[+~]{0,2}([a-z_]\w*(?:\.\w+)*)=")
KINDS = {word: kind for word, (kind, _, _) in COMMANDS.items()} | {"fork": COMMANDS["train"][0]}
ASYNC = ("async_training.partial_rollout", "async_training.require_batches")  # no single key of ours


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for indent, found, _, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if found == language:
                yield str(page.relative_to(ROOT)), textwrap.dedent(text) if indent else text


def commands() -> Iterator[tuple[str, list[str]]]:
    """The words of every `verl ...` in a bash block."""
    for page, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for number, word in enumerate(words):
                before = words[number - 1] if number else ";"
                starts = (
                    before in ("&&", "||", "|", ";", "then", "do") or before.endswith(";") or "=" in before
                )
                if word == "verl" and starts:
                    rest = words[number + 1 :]
                    ends = [at for at, each in enumerate(rest) if each in ("&&", "||", "|", ";", ">", "&")]
                    yield page, rest[: ends[0]] if ends else rest


def problem(words: list[str]) -> str:
    """What is wrong with a command; empty where nothing is."""
    if not words or words[0].startswith("-"):
        return "" if words in (["--version"], ["--help"]) else "no command"
    name, rest = words[0], words[1:]
    if words[:2] == ["eval", "--suite"]:
        name, rest = "generate", words[3:]
    if name == "completion":
        return "" if len(rest) == 1 and rest[0] in SCRIPTS else f"no shell {rest}"
    if name not in PROGRAMS:
        return f"no command {name}"
    entry = PROGRAMS[name]
    if isinstance(entry, dict):
        if not rest or rest[0] not in entry:
            return f"no command {name} {rest[:1]}"
        name, entry, rest = f"{name} {rest[0]}", entry[rest[0]], rest[1:]
    if name in KINDS:
        keys = [found[1] for word in rest if (found := KEY.match(word))]
        return ", ".join(f"no key {key}" for key in keys if not takes(KINDS[name], key))
    module = importlib.import_module(entry[0])
    if hasattr(module, "build_parser"):
        parser = module.build_parser()
    elif hasattr(module, "add_arguments"):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
    else:
        return ""
    if name in ("plan", "env test"):
        keys = [found[1] for word in rest if (found := KEY.match(word))]
        if wrong := [f"no key {key}" for key in keys if not takes(COMMANDS["train"][0], key)]:
            return ", ".join(wrong)
    options = {option for each in parsers(parser) for option in each._option_string_actions}
    given = [
        word.partition("=")[0] for word in rest if word.startswith("-") and not word.lstrip("-").isdigit()
    ]
    return ", ".join(f"no option {option}" for option in given if option not in options)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """It and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def takes(kind: type, key: str) -> bool:
    ours = our_name(kind, key)
    known = schema_keys(kind)
    return key in ("recipe", *ASYNC) or any(ours == each or ours.startswith(f"{each}.") for each in known)


def test_every_python_block_compiles() -> None:
    found = list(blocks("python"))
    assert len(found) >= 10
    for page, text in found:
        compile(text, page, "exec")


@pytest.mark.slow(seconds=11)  # imports the programs whose options are named
def test_every_command_of_a_bash_block_exists_and_takes_its_keys_and_options() -> None:
    found = list(commands())
    assert len(found) >= 30
    assert [
        f"{page}: verl {' '.join(words)}: {what}" for page, words in found if (what := problem(words))
    ] == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("trian", "no command trian"),
        ("reward tset", "no command reward ['tset']"),
        ("train trainer.epochs=3", "no key trainer.epochs"),
        ("sft algorithm.adv_estimator=grpo", "no key algorithm.adv_estimator"),
        ("view --nothing", "no option --nothing"),
        ("completion csh", "no shell ['csh']"),
        ("plan run.yaml --gpus 8 trainer.epochs=3", "no key trainer.epochs"),
        ("env test run.yaml --hand", "no option --hand"),
        ("train +rollout.n=4 recipe=dapo", ""),
        ("view checkpoints/verl/first --worst 3", ""),
    ],
)
def test_a_wrong_command_is_found(line: str, what: str) -> None:
    assert problem(line.split()) == what
