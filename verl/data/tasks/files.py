"""Rows to files, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows as one parquet file; a reader never sees half of it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), temporary)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"cannot write {path}: {error.strerror or error}. Choose a folder you may write to."
        ) from error
