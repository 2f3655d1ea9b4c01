"""Run an example's small script as a user types it, and check what the README beside it claims."""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le, "=": operator.eq}
CONDITION = re.compile(r"(>=|<=|>|<|=) *(-?[\d.e-]+)")


INSTALLED = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""The PATH with the `verl` command of this Python. The fixture `forked_path` has one that starts sooner."""


def run_script(
    script: Path, data: Path, folder: Path, *arguments: str, path: str
) -> subprocess.CompletedProcess[str]:
    """`sh SCRIPT ARGUMENTS` in a folder, with the code of this checkout."""
    environment = {**os.environ, "DATA": str(data), "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        ["sh", str(script), *arguments],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def check_example(name: str, data: Path, folder: Path, path: str) -> None:
    """Run examples/NAME/run_small.sh; its run folder must be as the README says."""
    run_script(EXAMPLES / name / "run_small.sh", data, folder, path=path)
    check_claims(EXAMPLES / name / "README.md", folder / "checkpoints" / "examples" / name)


def check_claims(readme: Path, run: Path) -> None:
    """Every row of the table and every file of the list below `## What to expect`."""
    claims, files = expectations(readme)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wrong = []
    for metric, first, last in claims:
        values = [row[metric] for row in rows if metric in row]
        if not values:
            wrong.append(f"{metric}: not in metrics.jsonl")
        for place, condition, value in (("first", first, values[:1]), ("last", last, values[-1:])):
            wrong += [f"{metric}, {place}: {number}, not {condition}" for number in value
                      if not holds(number, condition)]  # fmt: skip
    wrong += [f"{name}: missing or empty" for name in files if not list(filter(has_content, run.glob(name)))]
    assert not wrong, "\n".join([f"{readme} claims what is not so:", *wrong])


def has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0


def holds(value: float, condition: str) -> bool:
    return all(COMPARE[sign](value, float(bound)) for sign, bound in CONDITION.findall(condition))


def expectations(readme: Path) -> tuple[list[tuple[str, str, str]], list[str]]:
    """The rows (metric, first, last) of the table and the files of the list."""
    section = readme.read_text().partition("\n## What to expect\n")[2].partition("\n## ")[0]
    claims = re.findall(r"^\| `([^`]+)` \|([^|\n]*)\|([^|\n]*)\|$", section, re.MULTILINE)
    files = re.findall(r"^- `([^`]+)`", section, re.MULTILINE)
    assert claims and files, f"{readme} says nothing below `## What to expect`"
    for _, first, last in claims:
        for condition in (first, last):
            assert not CONDITION.sub("", condition).strip(" ,"), f"{readme}: {condition!r} cannot be read"
        assert CONDITION.search(first + last), f"{readme}: a row claims nothing"
    return claims, files
