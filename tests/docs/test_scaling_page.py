"""The failures on docs/scaling.md: each message is one of ours, and a test that the page names expects it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
# What differs from case to case: numbers, and the names of processes, calls and hosts.
VARIES = re.compile(
    r"\.\.\.|(?:rollout |reward model )?rank \d|-?\d[\d.:]*|\bhost\b|\b(?:values|generate|score|train_actor)\b|"
    r"gcs_server|vllm's server|vLLM's engine"
)


def rows(first_cell: str) -> list[list[str]]:
    """The cells of the table that begins with this cell."""
    lines = PAGE[PAGE.index(f"\n| {first_cell} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]


def fixed_parts(cell: str) -> list[str]:
    messages = re.findall(r"`([^`]+)`", cell)
    parts = [part.strip(" ():,;.") for message in messages for part in VARIES.split(message)]
    return [part for part in parts if len(part) > 7]


def files_of(cell: str) -> list[Path]:
    """Those the cell names; a name without folder is in the folder of the one before."""
    found: list[Path] = []
    for name in re.findall(r"`([^`]+\.py)`", cell):
        found.append(ROOT / name if "/" in name else found[-1].with_name(name))
    return found


def sources() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "verl").rglob("*.py")))


FAILURES = rows("process")
MESSAGES = rows("message")


@pytest.mark.parametrize("row", FAILURES, ids=lambda row: row[0])
def test_a_failure_has_tests_that_expect_its_message(row: list[str]) -> None:
    files = files_of(row[-1])
    assert files and all(path.is_file() for path in files), row
    expected = "\n".join(path.read_text(encoding="utf-8") for path in files)
    missing = [part for part in fixed_parts(row[3]) if part not in expected]
    assert not missing, f"{missing} in none of {[path.name for path in files]}"


def test_the_messages_on_the_page_are_ours() -> None:
    code = re.sub(r'"\s*\n\s*f?"', "", sources())  # literals that go on in the next line
    told = [part for row in FAILURES for part in fixed_parts(row[3])]
    told += [part for row in MESSAGES for part in fixed_parts(row[0])]
    rays = ["Unable to register worker with raylet"]
    assert len(told) > 12 and not [part for part in told if part not in code and part not in rays]
