"""Source files named in strings and in the documentation exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.structure.import_graph import ROOT, modules

REPOSITORY = ROOT.parent
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("benchmarks/**/*.md")]


def test_source_files_named_in_strings_exist():
    """The watchdog recognises a collective by the files on the stack; a file that moved would never be seen there."""
    named = {
        (str(path), found)
        for path in modules().values()
        for found in re.findall(r"[\"`](verl/[\w/]+\.py)[\"`]", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not [entry for entry in sorted(named) if not (REPOSITORY / entry[1]).exists()]


def test_files_named_in_the_documentation_exist():
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    named = {
        (page.name, found)
        for page in pages
        for found in re.findall(
            r"\b((?:verl|tests|benchmarks|examples)/[\w/.-]+\.(?:py|sh|slurm|md))", page.read_text()
        )
    }
    assert {page for page, _ in named} >= {"architecture.md", "scaling.md", "README.md"}
    assert not [entry for entry in sorted(named) if not (REPOSITORY / entry[1]).exists()]


def test_links_between_pages_lead_to_existing_files_and_headings():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            file = (page.parent / name) if name else page
            if not file.exists() or (heading and heading not in headings(file)):
                broken.append(f"{page.name}: {target}")
    assert not broken


def headings(page: Path) -> set[str]:
    """As GitHub names them in links, and the anchors that a page sets itself."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
    return named | set(re.findall(r'<a id="([^"]+)">', text))
