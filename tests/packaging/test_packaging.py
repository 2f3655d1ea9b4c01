"""What the package says about itself agrees with itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import verl

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements]


def test_every_core_dependency_stands_on_its_page_with_a_reason() -> None:
    core = PAGE.split("## Core")[1].split("## Extras")[0]
    rows = {
        row.split("|")[1].split()[0]: row.split("|")[2].strip()
        for row in core.splitlines()
        if row.startswith("| ")
    }
    rows.pop("package")
    assert sorted(rows) == sorted(names(PROJECT["dependencies"]))
    assert all(len(reason) > 20 for reason in rows.values())


def test_every_extra_stands_on_its_page() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert listed == set(PROJECT["optional-dependencies"])


def test_extras_that_errors_name_exist() -> None:
    """`missing_package(package, extra, ...)` must name an extra that can be installed."""
    named = set()
    for file in (ROOT / "verl").rglob("*.py"):
        named |= set(re.findall(r'missing_package\(\s*"[\w-]+",\s*"(\w+)"', file.read_text(encoding="utf-8")))
    assert named and named <= set(PROJECT["optional-dependencies"])


def test_the_version_has_one_home() -> None:
    assert PROJECT["dynamic"] == ["version"] and re.fullmatch(r"\d+\.\d+\.\d+.*", verl.__version__)


@pytest.mark.parametrize(
    "name",
    ["LICENSE", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "RELEASING.md", "docs/dependencies.md"],
)
def test_links_between_pages_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
        assert link.startswith("http") or (file.parent / link).exists(), f"{name} -> {link}"
