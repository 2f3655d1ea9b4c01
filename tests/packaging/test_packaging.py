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


def test_every_requirement_has_a_lower_bound_that_the_lowest_versions_are_made_of() -> None:
    """`make test-oldest` reads them with this pattern."""
    pattern = r'"[A-Za-z0-9-]+(\[[a-z]+\])?>=[0-9.]+'
    assert f"grep -oE '{pattern}' pyproject.toml" in (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for requirement in [*PROJECT["dependencies"], *extras]:
        assert requirement.startswith("verl[") or re.match(pattern, f'"{requirement}'), requirement


def test_the_supported_versions_of_python_are_the_same_everywhere() -> None:
    versions = [line.split()[-1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert PROJECT["requires-python"] == f">={versions[0]},<3.{int(versions[-1].split('.')[1]) + 1}"
    table = (ROOT / "docs/install.md").read_text(encoding="utf-8").split("## Python versions")[1]
    rows = re.findall(r"^\| ([\d., ]+) \| supported", table, flags=re.MULTILINE)
    assert [version for row in rows for version in row.split(", ")] == versions


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
