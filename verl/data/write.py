"""Rows to files; a file appears when it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.files import table_of
from verl.errors import DataError
from verl.json_input import replacing


def require_new(
    path: Path, key: str, *, read: Iterable[str], read_key: str, overwrite: bool, to_overwrite: str
) -> None:
    """Refuse to write over a file that is read, and over any that exists unless `overwrite`. The keys are named in
    messages; `to_overwrite` is what allows it."""
    if any(path.resolve() == Path(name).resolve() for name in read):
        raise DataError(f"{key}: {path} is the file that is read ({read_key}); give another name")
    if path.exists() and not overwrite:
        raise DataError(f"{key}: {path} exists; set {to_overwrite}, or another name")


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Parquet or jsonl, by the path's ending; the file appears when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            if path.suffix == ".jsonl":
                with open(draft, "w", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
            else:
                pyarrow.parquet.write_table(table_of(rows), draft)
    except pa.ArrowException as error:
        raise DataError(
            f"These rows do not fit one table: {error}. Write them as jsonl (--format jsonl)."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
