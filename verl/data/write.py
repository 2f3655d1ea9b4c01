"""Rows to files; a file appears when it is complete."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Parquet or jsonl, by the path's ending; the file appears when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as draft:
            pass
        try:
            if path.suffix == ".jsonl":
                with open(draft.name, "w", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
            else:
                # pyarrow would take the columns of the first row.
                names = dict.fromkeys(name for row in rows for name in row)
                full = [{name: row.get(name) for name in names} for row in rows]
                pyarrow.parquet.write_table(pa.Table.from_pylist(full), draft.name)
            os.chmod(draft.name, 0o644)
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
    except pa.ArrowException as error:
        raise DataError(
            f"These rows do not fit one table: {error}. Write them as jsonl (--format jsonl)."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
