"""`lineage.json` of a fork: the run it continues, from which step and under which other settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl.json_input import read_json

LINEAGE = "lineage.json"


@dataclass(frozen=True)
class Lineage:
    """Where a run was forked from; the parent's folder may be gone."""

    parent: str
    """Its folder at the time of the fork."""
    parent_name: str
    """project/experiment"""
    step: int
    """The last step of the parent that the fork continues."""
    overrides: tuple[str, ...]
    time: float


def read_lineage(run: Path) -> Lineage | None:
    """The lineage of a run folder; None where it is no fork, or the file cannot be read."""
    try:
        row = read_json(run / LINEAGE)
        step = row["step"]
        if not isinstance(step, int) or isinstance(step, bool):
            return None
        return Lineage(
            str(row["parent"]),
            str(row["parent_name"]),
            step,
            tuple(str(each) for each in row["overrides"]),
            float(row["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
