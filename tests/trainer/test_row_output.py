"""Rows written once more with further columns: every row, its own types, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.files import Rows, read_rows
from verl.errors import DataError
from verl.trainer.row_output import ExtendedRows

NEW = {"x": "list<string>"}


def extended(rows: Rows, numbers: Any, path: Path, overwrite: bool = False) -> ExtendedRows:
    keys = {"key": "data.output_path", "if_taken": "choose another name"}
    return ExtendedRows(rows, numbers, path, NEW, **keys, overwrite=overwrite)


def new(count: int) -> Iterator[dict[str, Any]]:
    return ({"x": [str(number)]} for number in range(count))


def test_more_rows_than_are_written_at_a_time(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array(range(2500), pa.int32())})
    pq.write_table(table, tmp_path / "in.parquet")
    extended(read_rows(tmp_path / "in.parquet"), range(2500), tmp_path / "out.parquet").write(new(2500))
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.schema.field("a").type == pa.int32()
    assert found.to_pylist() == [{"a": number, "x": [str(number)]} for number in range(2500)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_some_rows_of_several_files_in_order(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"a": [0, 1], "b": [{"c": [1.5]}, {"c": []}]}), tmp_path / "1.parquet")
    (tmp_path / "2.jsonl").write_text('{"a": 2, "d": "z"}\n{"a": 3, "d": null}\n')
    rows = read_rows([tmp_path / "1.parquet", tmp_path / "2.jsonl"])
    path = tmp_path / f"out.{kind}"
    extended(rows, [1, 2, 3], path).write(new(3))
    if kind == "parquet":
        found = pq.read_table(path).to_pylist()
    else:
        text = path.read_text()
        found = json.loads(text) if kind == "json" else [json.loads(line) for line in text.splitlines()]
    assert [(row["a"], row["x"]) for row in found] == [(1, ["0"]), (2, ["1"]), (3, ["2"])]
    assert found[0]["b"] == {"c": []} and found[1]["d"] == "z"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_columns_that_the_first_row_lacks_are_kept(tmp_path: Path, kind: str) -> None:
    rows = Rows.from_list([{"prompt": "p"}, {"prompt": "q", "answer": "4", "extra": {"k": 1}}])
    extended(rows, range(2), tmp_path / f"out.{kind}").write(new(2))
    found = read_rows(tmp_path / f"out.{kind}")
    assert set(found.column_names) == {"prompt", "answer", "extra", "x"}
    assert found[1] == {"prompt": "q", "answer": "4", "extra": {"k": 1}, "x": ["1"]}


def test_what_fails_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("before")

    def broken() -> Iterator[dict[str, Any]]:
        yield {"x": ["0"]}
        raise RuntimeError("in the middle")

    rows = Rows.from_list([{"a": 1}, {"a": 2}])
    with pytest.raises(DataError, match=r"out.jsonl exists; set data.overwrite=True, or another name"):
        extended(rows, range(2), tmp_path / "out.jsonl")
    output = extended(rows, range(2), tmp_path / "out.jsonl", overwrite=True)
    with pytest.raises(RuntimeError, match="in the middle"):
        output.write(broken())
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "before"


def test_values_json_does_not_know_are_written_as_text(tmp_path: Path) -> None:
    import datetime

    rows = Rows.from_list([{"day": datetime.date(2024, 1, 31), "raw": b"ab", "no": float("nan")}])
    extended(rows, [0], tmp_path / "out.jsonl").write(new(1))
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "day": "2024-01-31",
        "raw": "ab",
        "no": None,
        "x": ["0"],
    }


@pytest.mark.parametrize("rows", [[{"a": 1}, {"a": "one"}], [{"a": {}}], [{"a": 10**30}]])
def test_what_parquet_cannot_hold_is_said_at_once(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"data\.output_path=.*out\.jsonl"):
        extended(Rows.from_list(rows), range(len(rows)), tmp_path / "out.parquet")
