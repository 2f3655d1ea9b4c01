"""Rows to files; a file appears when it is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.atomic_file import replacing
from verl.errors import DataError


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
                # pyarrow would take the columns of the first row.
                names = dict.fromkeys(name for row in rows for name in row)
                full = [{name: row.get(name) for name in names} for row in rows]
                pyarrow.parquet.write_table(pa.Table.from_pylist(full), draft)
    except pa.ArrowException as error:
        raise DataError(
            f"These rows do not fit one table: {error}. Write them as jsonl (--format jsonl)."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
