"""Changelog, issue forms, the map of owners and the release checklist agree with the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import verl

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted(file for file in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_changelog_has_this_version_below_an_unreleased_section() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [
        re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})", heading) for heading in headings[1:]
    ]
    assert all(released), headings
    versions = [match[1] for match in released if match]
    # A version under development (X.Y.Z.dev0) has no section yet.
    assert ".dev" in verl.__version__ or versions[0] == verl.__version__
    assert len(set(versions)) == len(versions)


def test_every_part_of_the_changelog_has_a_known_kind_and_entries() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, *parts = re.split(r"^### ", release, flags=re.MULTILINE)
        names = [part.splitlines()[0] for part in parts]
        assert set(names) <= set(KINDS) and len(set(names)) == len(names), (heading, names)
        for part in parts:
            for area in re.split(r"^#### ", part, flags=re.MULTILINE)[1:] or [part]:
                assert re.search(r"^- ", area, flags=re.MULTILINE), (heading, area)


@pytest.mark.parametrize("file", FORMS, ids=[file.stem for file in FORMS])
def test_issue_forms_have_what_the_host_requires(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    identifiers = [field["id"] for field in fields]
    assert fields and len(set(identifiers)) == len(identifiers)
    for field in fields:
        assert (
            field["type"] in ("input", "textarea", "dropdown", "checkboxes") and field["attributes"]["label"]
        )
        options = field["attributes"].get("options", [])
        assert (field["type"] == "dropdown") == bool(options)
        assert all(isinstance(option, str) for option in options), "unquoted yes or no"


def test_the_bug_form_asks_for_the_version_report() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8"))
    asked = {field["id"]: field for field in form["body"] if "id" in field}
    assert "verl --version" in asked["versions"]["attributes"]["description"]
    assert asked["versions"]["validations"]["required"] and asked["command"]["validations"]["required"]


def test_every_package_has_an_owner_and_every_owned_path_exists() -> None:
    lines = (GITHUB / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    owned = {}
    for line in lines:
        if line and not line.startswith("#"):
            path, *owners = line.split()
            assert owners and all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners), line
            assert path not in owned, line
            owned[path] = owners
    assert owned.pop("*")
    for path in owned:
        there = ROOT / path.strip("/")
        assert path.startswith("/") and (there.is_dir() if path.endswith("/") else there.is_file()), path
    packages = {f"/verl/{file.name}/" for file in (ROOT / "verl").iterdir() if list(file.glob("*"))}
    assert {package for package in packages if "__pycache__" not in package} <= set(owned)


@pytest.mark.parametrize("name", [".github/PULL_REQUEST_TEMPLATE.md", "RELEASING.md", "CONTRIBUTING.md"])
def test_commands_of_the_checklists_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    used = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert used and used <= targets
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert module == "pytest" or path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (
            module
        )
    for path in re.findall(r"`((?:docs|tests|verl|docker|\.ci|benchmarks)/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), path
