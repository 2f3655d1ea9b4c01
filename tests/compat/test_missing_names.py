"""Every name that the public verl's examples and recipes import works here, or says what takes its place."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.structure.test_paths import headings
from verl.config.keys import schema_keys
from verl.config.schema import PPOConfig

ROOT = Path(__file__).parents[2]
ROWS = [
    json.loads(line)
    for line in (ROOT / "tests/data/verl/imports.jsonl").read_text(encoding="utf-8").splitlines()
]
TABLE = json.loads((ROOT / "verl/missing_names.json").read_text(encoding="utf-8"))
WORKS_TOO = {"verl", "verl.trainer.ppo.core_algos", "verl.utils.profiler", "verl.utils.profiler.performance"}
"""Modules of which other names work."""


def resolved(name: str) -> Any:
    """A module, which may need packages that are not here, or what is in one."""
    module, _, attribute = name.rpartition(".")
    with contextlib.suppress(ModuleNotFoundError):  # `module` is not a package
        if spec := importlib.util.find_spec(name):
            return spec
    return getattr(importlib.import_module(module), attribute)


def test_the_list_is_whole() -> None:
    assert len(ROWS) == 368
    assert sum(row["want"] == "works" for row in ROWS) == 93


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['module']}:{row['name']}")
def test_a_name_works_or_says_what_takes_its_place(row: dict[str, Any]) -> None:
    module, name = row["module"], row["name"]
    statement = f"from {module} import {name}" if name else f"import {module}"
    if row["want"] == "works" or f"{module}.{name}".rstrip(".") in WORKS_TOO:
        exec(statement, {})
        return
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert not isinstance(caught.value, ModuleNotFoundError)
    assert re.fullmatch(
        rf"{caught.value.name} is not in this verl\. .+\. See docs/[\w/-]+\.md[#\w-]*\.", str(caught.value)
    )
    assert f"{module}.{name}.".startswith(f"{caught.value.name}.")


@pytest.mark.parametrize("group", TABLE, ids=lambda group: group["names"][0])
def test_what_a_sentence_names_is_there(group: dict[str, Any]) -> None:
    page, _, heading = group["docs"].partition("#")
    assert not heading or heading in headings(ROOT / "docs" / page)
    assert (ROOT / "docs" / page).is_file()
    keys = schema_keys(PPOConfig)
    for typed in re.findall(r"`([^`]+)`", group["text"]):
        if typed.startswith("verl."):
            resolved(typed)
        elif typed.startswith("python -m "):
            resolved(typed.removeprefix("python -m "))
        elif "." in typed:
            key = typed.partition("=")[0]
            assert any(f"{name}.".startswith(f"{key}.") for name in keys), key


def test_no_name_is_twice_in_the_table_and_none_is_there() -> None:
    names = [name for group in TABLE for name in group["names"]]
    assert len(names) == len(set(names))
    for name in names:
        with pytest.raises(ImportError, match="is not in this verl"):
            resolved(name)


def test_names_that_the_public_verl_does_not_have_are_errors_as_anywhere() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.trainer\.ppp'"):
        importlib.import_module("verl.trainer.ppp")
    with pytest.raises(ImportError, match="cannot import name 'DataProtos'"):
        exec("from verl.protocol import DataProtos", {})


def test_what_looks_at_modules_finds_them_as_without_the_table() -> None:
    protocol = importlib.import_module("verl.protocol")
    assert not hasattr(protocol, "__wrapped__") and not hasattr(protocol, "unheard_of")
    with pytest.raises(ImportError):
        importlib.import_module("verl.single_controller.base")
    assert not [name for name in sys.modules if name.startswith("verl.single_controller")]

    def owner() -> None: ...

    owner.__module__ = None  # type: ignore[assignment]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(owner)  # which looks for it in every module
