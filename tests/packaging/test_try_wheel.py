"""`make dist-test` (tests/packaging/try_wheel.py): every extra has a command, and every command can be typed."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest

from tests.docs.test_blocks import problem
from tests.packaging.try_wheel import COMMANDS, EXTRAS, LEFT_OUT, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_extra_is_tried_or_has_a_reason_not_to_be() -> None:
    assert {*EXTRAS, *LEFT_OUT} == set(PROJECT["optional-dependencies"])
    assert not set(EXTRAS) & set(LEFT_OUT)


@pytest.mark.slow(seconds=11)  # imports the programs whose options are named
def test_every_command_exists_and_takes_its_keys_and_options() -> None:
    typed = [shlex.split(line.partition(" | ")[0]) for line in (*COMMANDS, *EXTRAS.values())]
    lines = [words[words.index("verl") + 1 :] for words in typed if "verl" in words]
    assert len(lines) > 25
    known = [words for words in lines if words[0] != "completion"]
    assert [f"{words}: {what}" for words in known if (what := problem(words))] == []


def test_a_training_run_for_an_extra_has_a_folder_of_its_own() -> None:
    names = [re.findall(r"experiment_name=(\w+)", line) for line in (*COMMANDS, *EXTRAS.values())]
    flat = [name for found in names for name in found]
    assert len(flat) == len(set(flat)) > 8
