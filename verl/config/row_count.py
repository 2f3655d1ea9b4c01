"""How many rows data files have, where that can be told at once: for messages about batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def rows_in(files: Sequence[str]) -> int | None:
    """Rows of parquet files (from their footers) and of jsonl files; None for anything else, or what cannot be read."""
    total = 0
    for name in files:
        path = Path(name).expanduser()
        try:
            if path.suffix == ".parquet":
                from pyarrow.parquet import read_metadata

                total += read_metadata(path).num_rows
            elif path.suffix == ".jsonl":
                with path.open("rb") as lines:
                    total += sum(1 for line in lines if line.strip())
            else:
                return None
        except (OSError, ValueError, ImportError):  # pyarrow's errors are ValueErrors
            return None
    return total
