"""A finding: what a diagnosis saw in a run, what that means and which keys to change.

Console, `verl view`, report and `metrics.jsonl` show the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    rule: str
    """The name of the diagnosis, e.g. entropy_collapsed."""
    seen: str
    meaning: str = ""
    try_: str = ""
    """Keys with values."""

    @property
    def line(self) -> str:
        """One line of text."""
        meaning = f": {self.meaning}" if self.meaning else ""
        return f"{self.seen}{meaning}" + (f". Try {self.try_}" if self.try_ else "")

    def to_row(self) -> dict[str, str]:
        """As `metrics.jsonl` holds it."""
        return {"rule": self.rule, "seen": self.seen, "meaning": self.meaning, "try": self.try_}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Finding:
        """Missing fields are empty."""
        return cls(*(str(row.get(name) or "") for name in ("rule", "seen", "meaning", "try")))


def read_findings(rows: Any) -> list[Finding]:
    """Those of the value of a "findings" field, whatever another program wrote there."""
    if not isinstance(rows, list):
        return []
    return [Finding.from_row(row) for row in rows if isinstance(row, Mapping) and row.get("seen")]
