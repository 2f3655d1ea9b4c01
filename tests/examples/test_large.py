"""The examples for GPUs: their configs resolve, their shell is valid, and each README lists its scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, INSTALLED, run_script

SCRIPTS = sorted(EXAMPLES.glob("*/run_*.sh"))
LARGE = [script for script in SCRIPTS if script.name != "run_small.sh"]


def label(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("script", LARGE, ids=label)
def test_a_larger_script_resolves_its_config(script: Path, tmp_path: Path) -> None:
    """`--cfg job` checks every key and value, and loads neither data nor model."""
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.parquet").touch()  # or the script would download them
    printed = run_script(script, tmp_path, tmp_path, "--cfg", "job", path=INSTALLED).stdout
    assert f"{tmp_path}/train.parquet" in printed
    assert "project_name: examples" in printed


def test_every_script_is_valid_shell_and_executable() -> None:
    assert SCRIPTS
    for script in SCRIPTS:
        assert script.read_text().startswith("#!/bin/sh\n# ") and "\nset -eu\n" in script.read_text(), script
        assert os.access(script, os.X_OK), f"{script} is not executable"
        subprocess.run(["sh", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", sorted({script.parent for script in SCRIPTS}), ids=label)
def test_the_readme_lists_the_scripts_of_its_folder(folder: Path) -> None:
    listed = re.findall(r"^\| \[?`(run_\w+\.sh)`", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(script.name for script in folder.glob("run_*.sh"))


def test_the_table_of_examples_names_the_scripts() -> None:
    sizes = {"small": "small", "one_gpu": "one GPU", "one_node": "one node", "several_nodes": "several nodes"}
    table = (EXAMPLES / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\w+)\]\([^)]+\) \| [^|]+ \| ([^|]*) \|$", table, re.MULTILINE))
    for folder in sorted({script.parent for script in SCRIPTS}):
        names = [shown for size, shown in sizes.items() if (folder / f"run_{size}.sh").exists()]
        assert rows.get(folder.name) == ", ".join(names), folder.name
