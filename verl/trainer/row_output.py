"""Write rows of an input file with added columns, in chunks, atomically.

Problems with rows, format or path are raised when the output is opened, before anything is generated for it.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from verl.data.files import Rows
from verl.data.write import require_new
from verl.errors import DataError
from verl.observe.jsonl import dumps

_CHUNK_ROWS = 1024
"""Rows written at a time."""


class ExtendedRows:
    """Some rows of `rows`, in the order of `numbers`, to be written to `path` with the columns `added`.

    `added` maps the new columns to their pyarrow types as text: `list<string>`, `list<double>` and so on."""

    def __init__(
        self,
        rows: Rows,
        numbers: Sequence[int],
        path: Path,
        added: Mapping[str, str],
        *,
        key: str,
        if_taken: str,
        overwrite: bool = False,
    ) -> None:
        """`key` is the config key of the path; `if_taken` is the advice when a column exists; `overwrite` is
        data.overwrite."""
        self.rows, self.numbers, self.path, self.key = rows, list(numbers), path, key
        self.added = {name: _type(kind) for name, kind in added.items()}
        taken = [name for name in rows.column_names if name in self.added]
        if taken:
            raise DataError(f"{key}: the data has a column {', '.join(taken)}; {if_taken}")
        require_output(path, key, rows, overwrite)
        self._table = self._checked_table() if path.suffix == ".parquet" else None

    def _checked_table(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet

        try:
            table = self.rows.table(self.numbers)
            with pyarrow.parquet.ParquetWriter(io.BytesIO(), self._schema(table)):
                pass
        except (pa.ArrowException, OverflowError) as error:  # OverflowError: an integer beyond 64 bits
            raise DataError(
                f"{self.key}: these rows do not fit one parquet table: {error}. Write them as jsonl instead: "
                f"{self.key}={self.path.with_suffix('.jsonl')}"
            ) from error
        return table

    def _schema(self, table: Any) -> Any:
        import pyarrow as pa

        # What another program keeps about the columns (pandas' index, for one) does not know the new ones.
        return pa.schema([*table.schema, *(pa.field(name, kind) for name, kind in self.added.items())])

    def write(self, columns: Iterable[Mapping[str, Any]]) -> None:
        """`columns` gives the new columns of each row, in order."""
        draft = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(draft, "wb") as file:
                if self._table is not None:
                    self._write_parquet(file, iter(columns))
                else:
                    self._write_json(file, columns)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
        except OSError as error:
            raise DataError(
                f"{self.key}: {self.path} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    def _write_parquet(self, file: Any, columns: Iterator[Mapping[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        table = self._table
        assert table is not None
        schema = self._schema(table)
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            for start in range(0, len(self.numbers), _CHUNK_ROWS):
                chunk = table.slice(start, _CHUNK_ROWS)
                new = list(islice(columns, chunk.num_rows))
                arrays = [
                    pa.array([row[name] for row in new], type=kind) for name, kind in self.added.items()
                ]
                writer.write_table(pa.Table.from_arrays([*chunk.columns, *arrays], schema=schema))

    def _write_json(self, file: Any, columns: Iterable[Mapping[str, Any]]) -> None:
        lines = self.path.suffix == ".jsonl"
        between = "\n" if lines else ",\n"
        file.write(b"" if lines else b"[\n")
        for at, (number, new) in enumerate(zip(self.numbers, columns, strict=True)):
            file.write((between if at else "").encode())
            file.write(dumps({**self.rows[number], **new}).encode("utf-8"))
        file.write(b"\n" if lines else b"\n]\n")


def require_output(path: Path, key: str, rows: Rows, overwrite: bool) -> None:
    """Create the folder of an output of `rows`; raise if the file is read or exists, or none can be created there."""
    require_new(
        path,
        key,
        read=rows.names,
        read_key="data.path",
        overwrite=overwrite,
        to_overwrite="data.overwrite=True",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DataError(
            f"{key}: nothing can be written to {path.parent}: {error.strerror or error}"
        ) from error


def _type(text: str) -> Any:
    """`list<...>` of pyarrow's plain type names."""
    import pyarrow as pa

    if text.startswith("list<"):
        return pa.list_(_type(text[5:-1]))
    return pa.type_for_alias(text)
